"""The paths of a run's checkpoints, in `checkpoints/` of its folder. Standard library only."""

import re
from pathlib import Path


def folder(run: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return run / "checkpoints"


def last(run: Path) -> Path:
    """Return the path of the newest checkpoint, from which the run continues."""
    return folder(run) / "last.ckpt"


def best(run: Path) -> Path:
    """Return the path of the checkpoint with the best monitored metric."""
    return folder(run) / "best.ckpt"


def step_path(checkpoints: Path, step: int) -> Path:
    """Return the path of an additional checkpoint (`checkpoint_keep`) in a folder of checkpoints."""
    return checkpoints / f"step_{step}.ckpt"


def step_checkpoints(checkpoints: Path) -> dict[int, Path]:
    """Return the checkpoints `step_<n>.ckpt` in a folder of checkpoints, by step, in order."""
    matches = [(re.fullmatch(r"step_(\d+)\.ckpt", path.name), path) for path in checkpoints.iterdir()]
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def best_in(run: Path) -> Path | None:
    """Return the best checkpoint in a run's folder or its `checkpoints/`; else the last; None if both are missing."""
    names = (best(run), last(run), run / best(run).name, run / last(run).name)
    return next((path for path in names if path.exists()), None)


def place_in_outputs(run: Path) -> Path:
    """Return a run's folder relative to `outputs`: `<name>/<time>`, of a sweep `<name>/sweeps/<time>/<job>`."""
    is_job = run.parent.parent.name == "sweeps"
    return Path(*run.parts[-4 if is_job else -2 :])


def run_of(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint belongs to."""
    return checkpoint.parent.parent
