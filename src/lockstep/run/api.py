"""Training from Python: `src/train.py` in a process of its own. That one has computed nothing, so that its workers may
be forked, and they run neither a script nor a notebook again. Workers that an engine has started train themselves."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf, open_dict

from lockstep.checkpoint import resume
from lockstep.config.arguments import check_arguments, quote_path
from lockstep.config.value_checks import ROOT, show
from lockstep.errors import UserError
from lockstep.launch.environment import PARENT, environment, external_workers
from lockstep.launch.parent import WorkerFailed
from lockstep.launch.signals import ENDING, signal_handler
from lockstep.run import cli, supervisor
from lockstep.run.summary import summary_of

FULL_ERROR = "HYDRA_FULL_ERROR"  # which `cli.run_command` sets


class Composed(dict[str, Any]):
    """A resolved config as plain containers.

    Attributes:
        overrides: what it was composed from; a run folder records them, so that the run can be resumed.
    """

    overrides: tuple[str, ...]

    def __init__(self, values: Any, overrides: tuple[str, ...]) -> None:
        super().__init__(values)
        super().__setattr__("overrides", overrides)

    def __setattr__(self, name: str, value: Any) -> None:
        raise UserError(f'config.{name}: a config does not change after compose(): compose("{name}={show(value)}")')


def compose(*overrides: str) -> Composed:
    """The config that `python src/train.py <overrides>` trains with.

    Raises:
        UserError: an override that does not fit conf/.
    """
    return Composed(_compose_config(overrides)[0], overrides)


def _compose_config(overrides: Sequence[str], for_command: bool = False) -> tuple[Any, list[str], str]:
    """The config as plain containers; the arguments of the command that trains with it, in which `resume=` is what it
    stands for; `for_command`, the folder of that run, which they name too."""
    try:
        cli.register_folder()
        task = resume.expand_resume(check_arguments(list(overrides)), "train")
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = hydra_compose("train", overrides=task, return_hydra_config=True)
        folder = ""
        if for_command:
            folder = str(cfg.hydra.run.dir)
            task = [*task, f"hydra.run.dir={quote_path(folder)}"]
        with open_dict(cfg):
            del cfg["hydra"]
        return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True), task, folder
    except UserError:
        raise
    except cli.BAD_INPUT as error:
        raise UserError(cli.error_line(error)) from None


def train(config: Composed) -> dict[str, Any]:
    """Trains and tests in worker processes, as the config's layout needs them; returns the summary that summary.json
    in the run's folder holds, and `folder`. The calling process may have computed before, on a GPU too.

    Raises:
        UserError: bad input; nothing was started, or kept.
        WorkerFailed: the run failed.
        KeyboardInterrupt: the run was interrupted; its checkpoint is saved.
    """
    environment.cache_clear()  # a process group may have been made since
    if not isinstance(config, Composed):
        raise UserError("train() takes what compose() returns")
    in_place = external_workers() > 0
    now, arguments, folder = _compose_config(config.overrides, for_command=not in_place)
    if changed := [key for key in sorted({*now, *config}) if now.get(key) != config.get(key)]:
        raise UserError(f"{changed[0]} was changed after compose(): give it there, as on the command line")
    return _train_in_place(config) if in_place else _train_in_process(arguments, folder)


def _train_in_process(arguments: Sequence[str], folder: str) -> dict[str, Any]:
    """As `train`, by the command itself, in a process that has computed nothing; what it prints is printed here."""
    path = os.pathsep.join(filter(None, sys.path))  # what this process can import
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "src" / "train.py"), *arguments],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": path, PARENT: str(os.getpid())},
        start_new_session=True,  # a Ctrl-C is for this process, which passes it on
    )
    ending = ""
    with signal_handler(lambda signum, frame: process.send_signal(signum), *ENDING, signal.SIGUSR1), process:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            if line.startswith(("error: ", "interrupted by ")):
                ending = line.rstrip()
    if process.returncode < 0:
        raise WorkerFailed(f"the run's process was killed by {signal.Signals(-process.returncode).name}")
    _raise_for(process.returncode, ending)
    return {**summary_of(Path(folder)), "folder": folder}


def _train_in_place(config: Composed) -> dict[str, Any]:
    """As `train`, in a worker that an engine has started (Ray Train): each of them calls it."""
    summary: dict[str, Any] = {}

    def job(raw: dict[str, Any], folder: Path) -> None:
        summary.update(supervisor.train(raw, folder), folder=str(folder))

    arguments, full = sys.argv, os.environ.get(FULL_ERROR)
    sys.argv = ["src/train.py", *config.overrides]
    try:
        code, line = cli.run_command(job, "train")
    finally:
        sys.argv = arguments
        os.environ.pop(FULL_ERROR)
        os.environ.update({FULL_ERROR: full} if full else {})
    _raise_for(code, line)
    return summary


def _raise_for(code: int, line: str) -> None:
    """Raise what an exit code of the command stands for; `line` is the one that it ends with."""
    if code == cli.REFUSED:
        raise UserError(line.removeprefix("error: "))
    if code > 128:
        raise KeyboardInterrupt(line)
    if code:
        raise WorkerFailed(line.removeprefix("error: "))
