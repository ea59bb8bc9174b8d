"""The run's loggers, inside its folder; what a killed run logged after its last checkpoint does not stand twice."""

from __future__ import annotations

import csv
import os
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lockstep.run.config import Config
from lockstep.run.instantiate import call, instantiate


def make_loggers(config: Config, folder: Path, step: int) -> list[Logger]:
    """What the config names; `step` optimizer steps are logged already."""
    if "_target_" not in config.logger:
        return []
    make: partial[Any] = instantiate("logger", {**config.logger, "_partial_": True}, folder=folder, save_dir=folder)
    if isinstance(make.func, type) and issubclass(make.func, TensorBoardLogger):
        # At the first start too: of those that it finds, TensorBoard takes only the ones after it for a restart.
        make = partial(make, purge_step=step + 1)
    logger = call("logger", make)
    if isinstance(logger, CSVLogger) and step and os.environ.get("RANK", "0") == "0":
        _keep_rows(logger, step)
    return [logger]


def _keep_rows(logger: CSVLogger, step: int) -> None:
    """Lightning's would remove the rows of the run that goes on: those of its `step` steps stay."""
    path = Path(logger.log_dir, "metrics.csv")
    before = path.with_name("metrics.before.csv")  # a run that is killed in here finds its rows there the next time
    if path.exists() and not before.exists():
        path.rename(before)
    if before.exists():
        with open(before, newline="") as file:
            rows = [row for row in csv.DictReader(file) if (row["step"] or "").isdigit()]
        logger.experiment.metrics = [row for row in rows if int(row["step"]) <= step]
        logger.save()
        before.unlink()
