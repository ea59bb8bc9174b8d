"""The loggers that a config names: rank zero opens them, a run that goes on goes on in the same ones."""

import csv
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from omegaconf import OmegaConf

from lockstep.config.arguments import key
from lockstep.config.check import Config
from lockstep.config.instantiate import call, instantiate, parameters
from lockstep.errors import UserError
from lockstep.files import replacing
from lockstep.launch.environment import environment

LEFT_OUT = ("callbacks", "logger", "debug", "outputs", "data_dir", "resume", "name")  # no hyper-parameters
# What no run is called by, beside what is no hyper-parameter.
NO_TITLE = {*LEFT_OUT, "threads", "num_workers", "checkpoint", "hydra", "sweep"}
LOGGERS_FILE = "loggers.json"  # in the run's folder: its title, and by which id each tracker knows the run
# How long a server may stay away: by default MLflow would wait for minutes, at each line that it is sent.
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
MLFLOW = {"completed": "FINISHED", "interrupted": "KILLED"}


def make_loggers(config: Config, folder: Path, step: int) -> list[Logger]:
    """What the config names; `step` optimizer steps are logged already.

    In a logger's file, `later:title` stands for what sets the run apart from others, and `later:sweep` for the sweep
    that it is a job of (empty where it is none).

    Raises:
        UserError: one can't be made, or opened.
    """
    path = folder / LOGGERS_FILE
    stored = {"title": title(folder)}
    try:
        stored |= json.loads(path.read_text()) if path.exists() else {}
    except (TypeError, ValueError):
        raise UserError(f"{path}: damaged; without it trackers begin a run of their own") from None
    sweep = folder.parent.name if (folder.parent / "multirun.yaml").exists() else ""
    known = {"folder": folder, "save_dir": folder, "title": stored["title"], "sweep": sweep}
    loggers = [
        _logger(f"logger.{name}", options, known, stored, step) for name, options in config.logger.items() if options
    ]
    if loggers and environment().rank == 0:
        with replacing(path) as file:
            file.write(json.dumps(stored).encode())
    return loggers


def _logger(name: str, options: dict[str, Any], known: dict[str, Any], stored: dict[str, str], step: int) -> Logger:
    make: partial[Any] = instantiate(name, {**options, "_partial_": True}, **known)
    kind = make.func if isinstance(make.func, type) else Logger
    if issubclass(kind, TensorBoardLogger):
        # At the first start too: of those that it finds, TensorBoard takes only the ones after it for a restart.
        return call(name, partial(make, purge_step=step + 1))
    if environment().rank:
        return DummyLogger()  # some would open what they write to
    os.environ.update({name: seconds for name, seconds in PATIENCE.items() if name not in os.environ})
    tracker = {"id", "run_id"} & parameters(kind)
    make = partial(make, **{option: stored[name] for option in tracker if name in stored})
    try:
        with _alone(Path(known["folder"]).parent):
            logger: Logger = call(name, make)
            if tracker:
                before = stored.get(name)
                _ = logger.experiment  # type: ignore[attr-defined]  # opens it
                stored[name] = str(logger.version)
                if before and isinstance(logger, MLFlowLogger):
                    logger.experiment.update_run(before, "RUNNING")
    except UserError:
        raise
    except Exception as error:  # a tracker's own, of whatever kind
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        right = f"; {name}.offline=true writes files, for later" * issubclass(kind, WandbLogger)
        if name in stored:
            right += f"; without {Path(known['folder'], LOGGERS_FILE)} a run of its own is begun"
        raise UserError(f"{name}: can't be opened: {reason}{right}") from error
    if isinstance(logger, CSVLogger) and step:
        _keep_rows(logger, step)
    return logger


def end_loggers(loggers: list[Logger], status: str) -> None:
    """Tells those that want to know how the run has ended; rank zero calls it."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish(exit_code=int(status != "completed"))
        elif isinstance(logger, MLFlowLogger):
            logger.finalize(MLFLOW.get(status, "FAILED"))


def hyper_parameters(config: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, bool | int | float | str]]:
    """The plain leaves of a config by dotted key, without what is null or no hyper-parameter."""
    for name, value in config.items():
        if value is None or name.startswith("_") or (not above and name in LEFT_OUT):
            continue
        if isinstance(value, Mapping):
            yield from hyper_parameters(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value if isinstance(value, bool | int | float | str) else str(value)


def title(folder: Path) -> str:
    """What sets a run apart, fit to be a file's name: what it was given on the command line, of a sweep's job what the
    other jobs were not given."""
    task_overrides, common = (
        list(map(_as_typed, OmegaConf.select(OmegaConf.load(file), "hydra.overrides.task"))) if file.exists() else []
        for file in (folder / ".hydra" / "hydra.yaml", folder.parent / "multirun.yaml")
    )
    distinguishing = [each for each in task_overrides if key(each).partition(".")[0] not in NO_TITLE]
    # Of a sweep's only job all is common.
    distinguishing = [each for each in distinguishing if each not in common] or distinguishing
    return re.sub(r"[^\w.=,+ -]+", "_", " ".join(distinguishing))[:100].strip("_") or "defaults"


def _as_typed(override: str) -> str:
    """Of a sweep's job Hydra writes `exact=True` where `exact=true` was given."""
    return re.sub("=(True|False)$", lambda match: match[0].lower(), override)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One run of a folder at a time: jobs of a sweep would make one experiment, or one database, twice."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system can
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


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
