"""Signals of a closed terminal, while modules are imported, before the workers exist, and when they are done.

Of a run in its middle: test_promise_6_nothing_lost.py; of a sweep: commands/test_sweeps.py.
"""

import fcntl
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, TIMEOUT, TINY, checkpoint_of, ended, forked, summary_of, wait_for, workers_of

from lockstep.callbacks import preemption
from lockstep.commands.api import compose
from lockstep.config.check import check
from lockstep.job import supervisor as runs
from lockstep.launch.signals import forward_signals

LONG_RUN = (*TINY, "max_epochs=100000", "checkpoint_every=10", "logger=none")


def on_a_terminal(terminal: int, *overrides: str, ignored: bool = False) -> "subprocess.Popen[str]":
    def prepare() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if ignored:  # nohup
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    command = [sys.executable, str(ROOT / "src" / "train.py"), *overrides]
    return subprocess.Popen(command, cwd=ROOT, preexec_fn=prepare, start_new_session=True, text=True, **streams)  # noqa: PLW1509


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("ignored", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_closed_terminal(tmp_path: Path, ignored: bool) -> None:
    """The terminal takes no more output either: the bar of the workers goes nowhere."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    folder = tmp_path / "run"
    layout = ("strategy=ddp", "devices=2")
    process = on_a_terminal(theirs, *LONG_RUN, *layout, f"hydra.run.dir={folder}", ignored=ignored)
    os.close(theirs)
    last = folder / "checkpoints" / "last.ckpt"

    def trains() -> bool:
        with suppress(OSError):
            os.read(ours, 1 << 16)
        return last.exists()

    wait_for(trains, process)
    workers = workers_of(process)
    os.close(ours)  # the kernel sends SIGHUP
    if ignored:
        saved = last.stat().st_mtime_ns
        wait_for(lambda: last.stat().st_mtime_ns > saved, process)
        time.sleep(0.5)
        assert process.poll() is None
        process.terminate()
    assert process.wait(TIMEOUT) == 143
    summary = summary_of(folder)
    name = "SIGTERM" if ignored else "SIGHUP"
    assert (summary["status"], summary["error"]) == ("interrupted", f"interrupted by {name}")
    assert summary["steps"] == checkpoint_of(folder)["global_step"] > 0
    assert all(map(ended, workers))


WHILE_IMPORTING = """
import os, sys
module, signum, path = sys.argv[1:]
class Strike:
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), int(signum))
sys.meta_path.insert(0, Strike())
sys.path.insert(0, os.path.dirname(path))
sys.argv[:] = [path]
exec(compile(open(path).read(), path, "exec"), {"__name__": "__main__", "__file__": path})
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("module", "signum"),
    [
        ("lockstep.commands.project_programs", signal.SIGINT),
        ("hydra", signal.SIGINT),
        ("hydra", signal.SIGTERM),
        ("hydra", signal.SIGHUP),
        ("torch", signal.SIGINT),  # after the command line is read
    ],
)
def test_a_signal_while_modules_are_imported_is_one_line(tmp_path: Path, module: str, signum: int) -> None:
    command = [sys.executable, "-c", WHILE_IMPORTING, module, str(int(signum)), str(ROOT / "src" / "train.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stderr) == (
        130 if signum == signal.SIGINT else 143,
        f"interrupted by {signal.Signals(signum).name}\n",
    )


SAVE = """
import os, signal, sys
sys.path.insert(0, "src")
from lockstep.commands import cli, project_programs
from train import train

def job(raw, folder):
    os.kill(os.getpid(), signal.SIGUSR1)
    result = project_programs.train(train, raw, folder)
    os.kill(os.getpid(), signal.SIGUSR1)
    return result

cli.command(job, "train")
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("mode", [(), ("-m",)], ids=["run", "sweep"])
def test_requested_to_save_with_nothing_to_save(tmp_path: Path, mode: tuple[str, ...]) -> None:
    (tmp_path / "save.py").write_text(SAVE)
    done = forked(tmp_path / "save.py", *mode, "max_steps=2", "batch_size=8", "logger=none", f"outputs={tmp_path}")
    assert done.returncode == 0, done.stderr
    (actual,) = tmp_path.rglob("summary.json")
    assert summary_of(actual.parent)["status"] == "completed"


@pytest.mark.usefixtures("processes")
def test_ctrl_c_before_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **how: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runs.run_in_workers(interrupted, check(dict(compose())), SimpleNamespace(train=range(640)), tmp_path)
    assert (summary_of(tmp_path)["status"], summary_of(tmp_path)["error"]) == ("interrupted", "interrupted by SIGINT")


def test_requested_to_end_while_the_ranks_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pending_signals: list[int] = [signal.SIGUSR1]
    monkeypatch.setattr(preemption, "pending_signals", pending_signals)
    monkeypatch.setattr(preemption.dist, "all_reduce", lambda *args: pending_signals.append(signal.SIGTERM))
    trainer: Any = SimpleNamespace(world_size=2, global_step=1, is_last_batch=True)
    module: Any = None
    preemption.Preemption(tmp_path).on_train_batch_end(trainer, module, None, None, 0)
    assert pending_signals == [signal.SIGTERM]


@pytest.mark.usefixtures("processes")
def test_requested_to_end_at_the_moment_when_a_worker_has(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [SimpleNamespace(pid=gone.pid)])
    with forward_signals() as received:
        signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]
