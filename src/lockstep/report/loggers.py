"""Open the loggers that a config names, on rank zero. A resumed run continues in the same ones."""

import csv
import json
import os
import re
from collections.abc import Iterable, Mapping
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
from lockstep.files import locked, write
from lockstep.launch.environment import environment

LEFT_OUT = ("callbacks", "logger", "debug", "outputs", "data_dir", "resume", "name")  # no hyper-parameters
# Keys that do not appear in the title of a run.
NO_TITLE = {*LEFT_OUT, "threads", "num_workers", "checkpoint", "hydra", "sweep"}
LOGGERS_FILE = "loggers.json"  # in the run's folder: the run's title, and its id in each tracker
# By default MLflow waits for minutes, each time it sends something, if the server does not answer.
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
MLFLOW = {"completed": "FINISHED", "interrupted": "KILLED"}


def make_loggers(config: Config, folder: Path, step: int) -> list[Logger]:
    """Return the config's loggers.

    In a logger's yaml file, `later:title` stands for the run's title, see `title`, and `later:sweep` for the name of
    its sweep (empty if the run is no job of a sweep).

    Args:
        step: optimizer steps that are logged already.

    Raises:
        UserError: A logger can't be made or opened.
    """
    if not any(config.logger.values()):
        return []
    path = folder / LOGGERS_FILE
    stored = {"title": title(folder)}
    try:
        stored |= json.loads(path.read_text()) if path.exists() else {}
    except (TypeError, ValueError):
        raise UserError(f"{path}: damaged: remove it, and trackers begin a new run") from None
    sweep = folder.parent.name if (folder.parent / "multirun.yaml").exists() else ""
    known = {"folder": folder, "save_dir": folder, "title": stored["title"], "sweep": sweep}
    loggers = [
        _logger(f"logger.{name}", options, known, stored, step) for name, options in config.logger.items() if options
    ]
    if environment().rank == 0:
        write(path, json.dumps(stored).encode())
    return loggers


def _logger(name: str, options: dict[str, Any], known: dict[str, Any], stored: dict[str, str], step: int) -> Logger:
    make: partial[Any] = instantiate(name, {**options, "_partial_": True}, **known)
    kind = make.func if isinstance(make.func, type) else Logger
    if issubclass(kind, TensorBoardLogger):
        # Set at the first start too: TensorBoard takes only the second and later start events for restarts.
        return call(name, partial(make, purge_step=step + 1))
    if environment().rank:
        return DummyLogger()  # some loggers open their files or connections at once
    os.environ.update({name: seconds for name, seconds in PATIENCE.items() if name not in os.environ})
    tracker = {"id", "run_id"} & parameters(kind)
    make = partial(make, **{option: stored[name] for option in tracker if name in stored})
    try:
        with locked(Path(known["folder"]).parent):  # jobs of a sweep would create one experiment or database at once
            logger: Any = call(name, make, of_any_kind=False)
            if not isinstance(logger, Logger):
                raise UserError(f"{name}._target_={options['_target_']}: must be a lightning.pytorch.loggers.Logger")
            if tracker:
                before = stored.get(name)
                _ = logger.experiment  # type: ignore[attr-defined]  # opens it
                stored[name] = str(logger.version)
                if before and isinstance(logger, MLFlowLogger):
                    logger.experiment.update_run(before, "RUNNING")
    except UserError:
        raise
    except Exception as error:  # trackers raise errors of many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        remedies = [f"use {name}.offline=true to upload later"] * issubclass(kind, WandbLogger)
        if name in stored:
            remedies.append(f"remove {Path(known['folder'], LOGGERS_FILE)} to begin a new run there")
        remedy = f": {', or '.join(remedies)}" * bool(remedies)
        raise UserError(f"{name}: can't be opened ({reason}){remedy}") from error
    if isinstance(logger, CSVLogger) and step:
        _keep_rows(logger, step)
    return logger


def end_loggers(loggers: list[Logger], status: str) -> None:
    """Send the run's status to trackers that show it. Rank zero calls this."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish(exit_code=int(status != "completed"))
        elif isinstance(logger, MLFlowLogger):
            logger.finalize(MLFLOW.get(status, "FAILED"))


def hyper_parameters(config: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, bool | int | float | str]]:
    """Yield the hyper-parameters of a config: its leaves by dotted key, without null values.

    Values that are not bool, int, float or str become their text. Keys of `LEFT_OUT`, such as `outputs` and
    `callbacks`, and keys that begin with an underscore are left out.

    Args:
        config: a resolved config as plain containers.
        above: prefix of the keys, ending with a dot; used by the recursion.
    """
    for name, value in config.items():
        if value is None or name.startswith("_") or (not above and name in LEFT_OUT):
            continue
        if isinstance(value, Mapping):
            yield from hyper_parameters(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value if isinstance(value, bool | int | float | str) else str(value)


def title(folder: Path) -> str:
    """Return the title of a run, valid as a file name: its overrides.

    The title of a sweep's job has only the overrides that other jobs do not have.
    """
    task_overrides, common = (
        list(map(_as_typed, OmegaConf.select(OmegaConf.load(file), "hydra.overrides.task"))) if file.exists() else []
        for file in (folder / ".hydra" / "hydra.yaml", folder.parent / "multirun.yaml")
    )
    distinguishing = [each for each in task_overrides if key(each).partition(".")[0] not in NO_TITLE]
    # All overrides of a sweep's only job are common to all jobs.
    distinguishing = [each for each in distinguishing if each not in common] or distinguishing
    return re.sub(r"[^\w.=,+ -]+", "_", " ".join(distinguishing))[:100].strip("_") or "defaults"


def _as_typed(override: str) -> str:
    """Return an override as the user typed it: Hydra records `exact=True` for a sweep's job with `exact=true`."""
    return re.sub("=(True|False)$", lambda match: match[0].lower(), override)


def _keep_rows(logger: CSVLogger, step: int) -> None:
    """Keep the CSV rows of the first `step` steps, which Lightning's logger would remove when a run is resumed."""
    path = Path(logger.log_dir, "metrics.csv")
    before = path.with_name("metrics.before.csv")  # keeps the rows if the run is killed here
    if path.exists() and not before.exists():
        path.rename(before)
    if before.exists():
        with open(before, newline="") as file:
            rows = [row for row in csv.DictReader(file) if (row["step"] or "").isdigit()]
        logger.experiment.metrics = [row for row in rows if int(row["step"]) <= step]
        logger.save()
        before.unlink()
