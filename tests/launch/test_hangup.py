"""A closed terminal ends a run as SIGTERM does; a signal ends a program that is still importing in one line.

Of a sweep, see run/test_sweeps.py.
"""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE, ROOT, TINY, checkpoint_of, ended, summary_of, wait_for, workers_of

ENDLESS = (*TINY, "max_epochs=100000", "checkpoint_every=10", "logger=none")


def on_a_terminal(terminal: int, *overrides: str, ignored: bool = False) -> "subprocess.Popen[str]":
    def prepare() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if ignored:  # nohup
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    command = [sys.executable, str(ROOT / "src" / "train.py"), *overrides]
    return subprocess.Popen(command, cwd=ROOT, preexec_fn=prepare, start_new_session=True, text=True, **streams)  # noqa: PLW1509


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal(tmp_path: Path, ignored: bool) -> None:
    """The terminal takes no more output either: the bar of the workers goes nowhere."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    folder = tmp_path / "run"
    layout = ("strategy=ddp", "devices=2")
    process = on_a_terminal(theirs, *ENDLESS, *layout, f"hydra.run.dir={folder}", ignored=ignored)
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
    assert process.wait(PATIENCE) == 143
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


@pytest.mark.parametrize(
    ("module", "signum"),
    [
        ("lockstep.run", signal.SIGINT),
        ("hydra", signal.SIGINT),
        ("hydra", signal.SIGTERM),
        ("hydra", signal.SIGHUP),
        ("torch", signal.SIGINT),  # after the command line is read
    ],
)
def test_a_signal_while_modules_are_imported_is_one_line(tmp_path: Path, module: str, signum: int) -> None:
    command = [sys.executable, "-c", WHILE_IMPORTING, module, str(int(signum)), str(ROOT / "src" / "train.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (
        130 if signum == signal.SIGINT else 143,
        f"interrupted by {signal.Signals(signum).name}\n",
    )
