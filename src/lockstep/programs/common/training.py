"""Take steps of a run again, in a folder of their own."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.checkpoint.io import copy_checkpoint
from lockstep.config.check import Config
from lockstep.data import Splits
from lockstep.data.build import open_data
from lockstep.errors import UserError
from lockstep.job.training import fit_and_test
from lockstep.launch.environment import external_workers
from lockstep.launch.parent import launch


def check_one_machine(program: str, raw: Mapping[str, Any]) -> None:
    """Check that a program that starts workers itself is asked for one machine, and that no engine has started it.

    Raises:
        UserError: it is not.
    """
    if raw["num_nodes"] != 1 or external_workers():
        raise UserError(f"{program} runs on one machine: use num_nodes=1, without torchrun")


def open_without_test(config: Config) -> Splits:
    """Open the data of a config, without a test split."""
    return replace(open_data(config.data, config.data_dir, config.seed), test=None)


def train_quietly(config: Config, data: Splits, folder: Path) -> dict[str, Any]:
    """Train in this worker, without the lines that a run logs. Return the run's summary."""
    logging.disable(logging.WARNING)
    return fit_and_test(config, data, folder)


def train_from(
    start: Path | None, config: Config, data: Splits, folder: Path, work: Callable[..., Any] = train_quietly
) -> Any:
    """Train in workers, from a checkpoint or from the seed. Return what `work` returns. No profiler writes its files.

    Args:
        start: the checkpoint, which is copied; None: from the seed.
        config: the run's config. A callback ends the run.
        data: the data.
        folder: the run's folder, without checkpoints.
        work: the function that a worker calls with config, data and folder.

    Raises:
        UserError, WorkerFailed, Interrupted: see `launch`.
    """
    (folder / "checkpoints").mkdir(parents=True)
    config = replace(config, debug=replace(config.debug, trainer={**config.debug.trainer, "profiler": None}))
    if start is not None:
        copy_checkpoint(start, folder / "checkpoints" / "last.ckpt")
    return launch(work, config, data, folder, layout=config.layout, hang_timeout=config.hang_timeout)
