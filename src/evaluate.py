"""Test a checkpoint on any layout:  python src/evaluate.py checkpoint=<file or run folder> devices=2"""

if __name__ == "__main__":
    import lockstep.exit_on_signal  # noqa: F401  from here on Ctrl-C prints one line

from pathlib import Path
from typing import Any

from lockstep.run import cli


def evaluate(raw: dict[str, Any], folder: Path) -> Any:
    """Evaluate: find the checkpoint, open its data, and launch the workers, which test."""
    from lockstep.data.build import open_data
    from lockstep.run.evaluation import (
        check_same_images,
        choose_test_images,
        config_of,
        find_checkpoint_and_record,
        spec_of,
    )
    from lockstep.run.evaluation import evaluate as work
    from lockstep.run.supervisor import run_in_workers

    checkpoint, record = find_checkpoint_and_record(raw)
    config = config_of(checkpoint, record, raw)
    trained_classes = spec_of(checkpoint, record).classes
    splits = open_data(config.data, config.data_dir, config.seed, trained_classes)
    check_same_images(checkpoint, record, splits.spec)
    return run_in_workers(work, config, choose_test_images(splits, raw["split"], raw, record), folder)


if __name__ == "__main__":
    cli.command(evaluate, "evaluate", __file__)
