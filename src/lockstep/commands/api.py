"""Train from Python.

`train` runs `src/train.py` in a new process. That process has computed nothing, so it may fork its workers, and the
workers do not run the calling script or notebook again. Inside workers that an engine has started, it trains in place.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig

from lockstep.checkpoint import resume
from lockstep.commands import cli, project_programs
from lockstep.config.arguments import Arguments, read_arguments
from lockstep.config.check import as_plain
from lockstep.config.hydra_quirks import VERSION_BASE, without_outer_hydra
from lockstep.config.pages import quote_path, with_one_search_path
from lockstep.config.value_checks import show
from lockstep.errors import UserError, WorkerFailed
from lockstep.launch.environment import environment, external_workers
from lockstep.launch.process_group import gather_objects, remove_decisions
from lockstep.launch.programs import started
from lockstep.launch.signals import ENDING, signal_handler
from lockstep.project import project
from lockstep.report.summary import summary_of
from lockstep.text import signal_name

FULL_ERROR = "HYDRA_FULL_ERROR"  # `cli.run_command` sets this variable


class Composed(dict[str, Any]):
    """A resolved config as plain containers.

    Attributes:
        overrides: the overrides that it was composed from. The run folder records them, so the run can be resumed.
        composed: a copy of it.
    """

    overrides: tuple[str, ...]
    composed: dict[str, Any]

    def __init__(self, values: Any, overrides: tuple[str, ...]) -> None:
        super().__init__(values)
        super().__setattr__("overrides", overrides)
        super().__setattr__("composed", deepcopy(dict(self)))

    def __setattr__(self, name: str, value: Any) -> None:
        raise UserError(f'config.{name}: a config is fixed after compose(): use compose("{name}={show(value)}")')


def compose(*overrides: str) -> Composed:
    """Compose the config that `python src/train.py <overrides>` trains with.

    Args:
        overrides: overrides as on the command line, `"model=resnet18"`.

    Returns:
        The resolved config. Pass it to `train` unchanged.

    Raises:
        UserError: An override does not fit conf/.
    """
    with _one_line_errors(overrides):
        arguments = resume.resolve_start(read_arguments(overrides, "train"))  # so it is the same run later
        cfg, _ = _compose_command(arguments)
        return Composed(as_plain(cfg), arguments.overrides)


def _compose_command(arguments: Arguments) -> tuple[DictConfig, list[str]]:
    """Return the config of the command `src/train.py <arguments>`, and its arguments with `resume=` resolved."""
    cli.register_folder()
    line = with_one_search_path(resume.resolve(arguments).line)
    with without_outer_hydra(), initialize_config_dir(str(project().conf), **VERSION_BASE):
        return hydra_compose("train", overrides=line, return_hydra_config=True), line


@contextmanager
def _one_line_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Inside the `with` block, turn the errors of Hydra and OmegaConf into UserErrors of one line."""
    try:
        yield
    except UserError:
        raise
    except cli.BAD_INPUT as error:
        raise UserError(cli.error_line(error, overrides)) from None


def train(config: Composed) -> dict[str, Any]:
    """Train and test in worker processes on the config's layout.

    The calling process may have computed before, also on a GPU.

    Args:
        config: what `compose` returned.

    Returns:
        The content of the run's summary.json, and the run's folder as `folder`.

    Raises:
        UserError: The input is bad. Nothing was started, and no folder is left behind.
        WorkerFailed: The run failed.
        KeyboardInterrupt: The run was interrupted. Its checkpoint is saved.
    """
    environment.cache_clear()  # the caller may have made a process group since
    if not isinstance(config, Composed):
        raise UserError(f"train() got a {type(config).__name__}: pass the config that compose() returned")
    with _one_line_errors(config.overrides):
        before = config.composed
        if changed := [key for key in sorted({*before, *config}) if before.get(key) != config.get(key)]:
            raise UserError(f"{changed[0]} was changed after compose(): pass it to compose() as an override")
        cfg, arguments = _compose_command(read_arguments(config.overrides, "train"))
        if (name := config["name"]) != cfg.name:  # it has a resolver such as ${now:}, which gives another value now
            arguments = [*arguments, f"name={quote_path(name)}"]
            cfg, _ = _compose_command(read_arguments(arguments, "train"))
        folder = None if external_workers() else str(cfg.hydra.run.dir)  # workers agree on it in `_train_in_place`
    return _train_in_process(arguments, folder) if folder else _train_in_place(config)


def _train_in_process(arguments: Sequence[str], folder: str) -> dict[str, Any]:
    """Train with the command `src/train.py` in a new process, and copy its output to stderr; otherwise as `train`."""
    arguments, ending = [*arguments, f"hydra.run.dir={quote_path(folder)}"], ""
    with (
        started(project(), arguments, stderr=subprocess.PIPE, text=True, errors="replace") as process,
        signal_handler(lambda signum, frame: process.send_signal(signum), *ENDING, signal.SIGUSR1),
    ):
        assert process.stderr is not None
        for line in process.stderr:
            with suppress(OSError, ValueError, AttributeError):  # the reader has exited, or it is closed or None
                sys.stderr.write(line)
            if line.startswith(("error: ", "interrupted by ")):
                ending = line.rstrip()
        process.wait()
    if process.returncode < 0:
        raise WorkerFailed(f"the run's process was killed by {signal_name(-process.returncode)}")
    _raise_for(process.returncode, ending)
    return {**summary_of(Path(folder)), "folder": folder}


def _train_in_place(config: Composed) -> dict[str, Any]:
    """Train in this process, a worker that an engine (Ray Train) has started. Every worker must call it."""
    summary: dict[str, Any] = {}

    def program(raw: dict[str, Any], folder: Path) -> None:
        summary.update(project_programs.train(None, raw, folder), folder=str(folder))

    full = os.environ.get(FULL_ERROR)
    try:
        code, line = cli.run_command(program, "train", config.overrides)
        if code == 0:
            remove_decisions()
            gather_objects(None)  # wait until all are removed: this worker may train another run
    finally:
        os.environ.pop(FULL_ERROR)
        os.environ.update({FULL_ERROR: full} if full else {})
    _raise_for(code, line)
    return summary


def _raise_for(code: int, line: str) -> None:
    """Raise the exception that stands for the command's exit code; `line` is the last line that it printed."""
    if code == cli.REFUSED:
        raise UserError(line.removeprefix("error: "))
    if code > 128:
        raise KeyboardInterrupt(line)
    if code:
        raise WorkerFailed(line.removeprefix("error: "))
