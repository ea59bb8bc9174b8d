"""Train on any layout:  python src/train.py strategy=ddp devices=4 accumulate_grad_batches=2"""

from pathlib import Path
from typing import Any

from lockstep.run import cli, config, resume


def train(raw: dict[str, Any], folder: Path) -> Any:
    """One run: check, open the data, launch the workers, which fit and test."""
    checked = config.check(raw, given=resume.given())

    from lockstep.loading import open_data
    from lockstep.run.supervisor import run_in_workers
    from lockstep.run.training import train as work

    splits = open_data(checked.data, checked.data_dir, checked.seed)
    return run_in_workers(work, checked, splits, folder)


if __name__ == "__main__":
    cli.command(train, "train")
