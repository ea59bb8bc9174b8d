"""Predict images with a trained model:  python src/predict.py checkpoint=<file or run folder> images=<folder>"""

from lockstep import Job, command


def predict(job: Job) -> None:
    """Predict the images, for predictions.csv. Each worker of the layout calls this."""
    module = job.make_module()
    data = job.make_data()
    trainer = job.make_trainer(module)
    trainer.predict(module, datamodule=data, return_predictions=False)


if __name__ == "__main__":
    command(predict, __file__)
