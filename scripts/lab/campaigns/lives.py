"""A life of a run: one start of src/train.py, in a session of its own, to be watched, struck and waited for.

A life is a fork of this process, which has imported everything: it takes a second instead of six, and hundreds of them
are affordable. Linux only: processes are found in /proc.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config.value_checks import ROOT

MOST = 1 << 20  # bytes that are read of what a life says
NEEDED = ("torch.distributed.launcher.api", "torch.utils.tensorboard", "lockstep.run.training", "project.models")


class Life:
    """A running `src/train.py` with these arguments; or scripts/verify.py.

    Args:
        program: its name, which is that of a module that has a function of this name.
        elsewhere: the beginning of a command that runs the rest of it, from the program's name on, on another machine,
            without a fork's speed.
    """

    def __init__(self, arguments: Sequence[str], program: str = "train", elsewhere: Sequence[str] = ()) -> None:
        for name in NEEDED:
            importlib.import_module(name)
        self.arguments = list(arguments)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        process_arguments = (program, self.arguments, elsewhere, self._output.fileno())
        self._process = multiprocessing.get_context("fork").Process(target=_live, args=process_arguments)
        self._process.start()
        self.pid = self._process.pid or 0
        self._began = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    @property
    def code(self) -> int | None:
        """Its exit code as a shell tells it (128 + n after signal n); None while it lives."""
        exit_code = self._process.exitcode
        return exit_code if exit_code is None or exit_code >= 0 else 128 - exit_code

    @property
    def text(self) -> str:
        """What it has said so far, on both streams."""
        return os.pread(self._output.fileno(), MOST, 0).decode(errors="replace")

    def wait(self, seconds: float, ready: Callable[[], Any] = lambda: False) -> int | None:
        """Its exit code, or None if it is still there after `seconds`, or when it is `ready`."""
        until = time.monotonic() + seconds
        while self.code is None and time.monotonic() < until and not ready():
            time.sleep(0.01)
        return self.code

    def members(self) -> dict[int, int]:
        """Living processes of its session, orphans included: pid -> parent's pid, oldest first."""
        processes = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has ended meanwhile
                fields = entry.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.pid and fields[0] not in "ZX":
                    processes.append((int(fields[19]), int(entry.parent.name), int(fields[1])))
        return {pid: parent for _, pid, parent in sorted(processes)}

    def ranks(self) -> list[int]:
        """Its workers, rank zero first: forks of the parent (`git`, which it asks for the commit, is none)."""
        command = _command(self.pid)
        return [pid for pid, parent in self.members().items() if parent == self.pid and _command(pid) == command]

    def left(self, seconds: float) -> set[str]:
        """The commands of its processes that are still there after `seconds`; they are killed."""
        until = time.monotonic() + seconds
        while (members := self.members()) and time.monotonic() < until:
            time.sleep(0.05)
        commands = {_command(pid) for pid in members}
        self.strike(signal.SIGKILL, *members)
        return commands

    def strike(self, signum: int, *pids: int) -> None:
        """Sends a signal to processes, those that are gone excepted."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def close(self) -> None:
        """Ends whatever is left of it."""
        self.left(0)
        self.wait(5)
        self._output.close()


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    return ""


def _live(program: str, arguments: list[str], elsewhere: Sequence[str], output: int) -> None:
    """What `python src/train.py` does, in a fork."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    if elsewhere:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "scripts" / "lab"), os.environ.get("PYTHONPATH", "")])
        os.execvp(elsewhere[0], [*elsewhere, f"src/{program}.py", *arguments])
    sys.argv = [f"{program}.py", *arguments]
    from lockstep.run import cli

    cli.command(getattr(importlib.import_module(program), program), program)
