"""Predict images with a trained model:  python src/predict.py checkpoint=<file or run folder> images=<folder>"""

if __name__ == "__main__":
    import lockstep.exit_on_signal  # noqa: F401  from here on Ctrl-C prints one line

import logging
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.value_checks import whole_number
from lockstep.errors import UserError
from lockstep.launch.process_lifetime import in_new_thread
from lockstep.run import cli


def predict(raw: dict[str, Any], folder: Path) -> Any:
    """Predict: find the checkpoint and the images, and launch the workers, which write predictions.csv."""
    from lockstep.run.prediction import as_splits, config_and_spec
    from lockstep.run.prediction import predict as work
    from lockstep.run.supervisor import run_in_workers

    images, top_k = raw.pop("images"), raw.pop("top_k")
    config, spec = config_and_spec(raw)
    if top_k is not None and spec.task != "classification":
        raise UserError(f"top_k={top_k}: the model is for {spec.task}, without one class per image: leave it out")
    if top_k is not None and whole_number(1)("top_k", top_k) > spec.num_classes:
        raise UserError(f"top_k={top_k}: must be at most {spec.num_classes}, the number of the model's classes")
    splits = as_splits(spec, open_images(images, config, spec))
    return run_in_workers(partial(work, top_k=top_k), config, splits, folder)


@in_new_thread  # user code may start threads, and this process must be able to fork
def open_images(images: Any, config: Any, spec: Any) -> Any:
    """Open the images to be predicted, with the transforms of evaluation."""
    from lockstep.data.transforms import as_evaluated
    from lockstep.vision.data import ImageFiles

    reading = {key: config.data[key] for key in ("background", "bits") if key in config.data}
    files = ImageFiles(images, spec.image_size, spec.channels, **reading)
    if files.about:
        logging.getLogger("lockstep").info("images: %s", files.about)
    return as_evaluated(files, config.data, spec)


if __name__ == "__main__":
    cli.command(predict, "predict", __file__)
