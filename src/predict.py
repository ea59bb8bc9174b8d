"""Predict images with a trained model:  python src/predict.py checkpoint=<file or run folder> images=<folder>"""

if __name__ == "__main__":
    import lockstep.exit_on_signal  # noqa: F401  from here on Ctrl-C prints one line

from typing import Any

from lockstep import Job, command


def predict(job: Job) -> None:
    """Predict the images, for predictions.csv. Each worker of the layout calls this."""
    module = job.make_module()
    data = job.make_data()
    trainer = job.make_trainer(module)
    trainer.predict(module, datamodule=data, return_predictions=False)


def open_images(images: Any, size: int, channels: int, **reading: Any) -> Any:
    """Return the data set of the images that `images=` names: a folder, a file, or a list of them."""
    from lockstep.vision.data import ImageFiles  # it imports torch, which takes longer than to check the arguments

    return ImageFiles(images, size, channels, **reading)


if __name__ == "__main__":
    command(predict, __file__, open_images=open_images)
