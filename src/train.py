"""Train on any layout:  python src/train.py strategy=ddp devices=4 accumulate_grad_batches=2"""

from lockstep import Job, command


def train(job: Job) -> None:
    """Fit and test. Each worker of the layout calls this.

    It is yours to change. Errors, checkpoints, the summary and what continues after a kill are Lockstep's.
    """
    module = job.make_module()
    data = job.make_data()
    trainer = job.make_trainer(module)
    trainer.fit(module, datamodule=data, ckpt_path=job.checkpoint)
    if job.has_test:
        trainer.test(module, datamodule=data, ckpt_path="best")


if __name__ == "__main__":
    command(train, __file__)
