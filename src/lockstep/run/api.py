"""Training from Python: what `src/train.py` does, without leaving the process. It is done in a process of its own: that
one has computed nothing, so that its workers may be forked, and they run neither a script nor a notebook again."""

import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from lockstep import began
from lockstep.checkpoint import resume
from lockstep.config.arguments import keyed
from lockstep.config.checks import ROOT, show
from lockstep.errors import UserError
from lockstep.launch.agent import WorkerFailed
from lockstep.launch.environment import STARTED, environment, export, external_workers
from lockstep.launch.interpreter import import_quickly, leave
from lockstep.launch.signals import ENDING, handling, set_parent_death_signal
from lockstep.run import cli, supervisor

FULL_ERROR = "HYDRA_FULL_ERROR"  # which `cli.run` sets
PROGRAM = "from lockstep.run import api; api._run()"


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
    try:
        task = resume.overrides(keyed(list(overrides)), "train")
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = hydra_compose("train", overrides=task)
        return Composed(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True), overrides)
    except UserError:
        raise
    except cli.BAD_INPUT as error:
        raise UserError(cli.line(error)) from None


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
    now = compose(*config.overrides)
    if changed := [key for key in sorted({*now, *config}) if now.get(key) != config.get(key)]:
        raise UserError(f"{changed[0]} was changed after compose(): give it there, as on the command line")
    if external_workers():
        return _train_in_place(config)
    answers, answer = Pipe(duplex=False)
    command = [sys.executable, "-c", PROGRAM, str(answer.fileno()), str(os.getpid()), *config.overrides]
    path = os.pathsep.join(filter(None, sys.path))  # what this process can import
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=[answer.fileno()],
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # a Ctrl-C is for this process, which passes it on
    )
    answer.close()
    with handling(lambda signum, frame: process.send_signal(signum), *ENDING, signal.SIGUSR1), process:
        try:
            code, said, summary = answers.recv()
        except EOFError:
            raise WorkerFailed("the run's process was killed") from None
    _raise_for(code, said)
    return dict(summary)


def _train_in_place(config: Composed) -> dict[str, Any]:
    """As `train`, in a worker that an engine has started (Ray Train): each of them calls it."""
    summary: dict[str, Any] = {}

    def job(raw: dict[str, Any], folder: Path) -> None:
        summary.update(supervisor.train(raw, folder), folder=str(folder))

    arguments, full = sys.argv, os.environ.get(FULL_ERROR)
    sys.argv = ["src/train.py", *config.overrides]
    try:
        code, line = cli.run(job, "train")
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


def _run() -> None:
    """The run's own process."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as in `cli.command`
    export(**{STARTED: str(began)})
    import_quickly()
    answer, parent = Connection(int(sys.argv.pop(1))), int(sys.argv.pop(1))
    set_parent_death_signal(parent)
    summary: dict[str, Any] = {}

    def job(raw: dict[str, Any], folder: Path) -> None:
        summary.update(supervisor.train(raw, folder), folder=str(folder))

    answer.send((*cli.run(job, "train"), summary))
    leave(0)
