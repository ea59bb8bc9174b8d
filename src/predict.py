"""What a trained model says about images:  python src/predict.py checkpoint=<file or run folder> images=<folder>"""

from pathlib import Path
from typing import Any

from lockstep.run import cli


def predict(raw: dict[str, Any], folder: Path) -> Any:
    """One prediction: find the checkpoint and the images, launch the workers, which write predictions.csv."""
    from lockstep.run.evaluation import find_checkpoint
    from lockstep.run.opening import as_evaluated
    from lockstep.run.prediction import as_splits, config_and_spec
    from lockstep.run.prediction import predict as work
    from lockstep.run.supervisor import run_in_workers
    from project.data import ImageFiles

    images = raw.pop("images")
    config, spec = config_and_spec(find_checkpoint(raw), raw)
    files = ImageFiles(Path(str(images)).expanduser(), spec.image_size, spec.channels)
    splits = as_splits(spec, as_evaluated(files, config.data, spec))
    return run_in_workers(work, config, splits, folder)


if __name__ == "__main__":
    cli.command(predict, "predict")
