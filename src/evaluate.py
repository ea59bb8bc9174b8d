"""Test a checkpoint on any layout:  python src/evaluate.py checkpoint=<file or run folder> devices=2"""

from lockstep import Job, command


def evaluate(job: Job) -> None:
    """Test the checkpoint's weights. Each worker of the layout calls this."""
    module = job.make_module()
    data = job.make_data()
    trainer = job.make_trainer(module)
    trainer.test(module, datamodule=data, ckpt_path=job.checkpoint)


if __name__ == "__main__":
    command(evaluate, __file__)
