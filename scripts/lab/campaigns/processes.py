"""Start src/train.py in a session of its own, watch it, send it signals, and wait for its end.

The program runs in a fork of this process, which has imported everything. It starts in one second instead of six, so
that a campaign can afford hundreds of starts. Linux only: processes are listed in /proc.
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

from repository import ROOT

MAX_OUTPUT_BYTES = 1 << 20  # later output is not read
NEEDED = ("torch.distributed.launcher.api", "torch.utils.tensorboard", "lockstep.job.training", "project.models")


class Process:
    """One execution of `src/train.py`, or of `lockstep verify`.

    Args:
        arguments: the program's arguments.
        program: name of the program, and of the function in its module.
        prefix: a command prefix that runs the program on another machine. There it starts without a fork.
    """

    def __init__(self, arguments: Sequence[str], program: str = "train", prefix: Sequence[str] = ()) -> None:
        for name in NEEDED:
            importlib.import_module(name)
        self.arguments = list(arguments)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        process_arguments = (program, self.arguments, prefix, self._output.fileno())
        self._process = multiprocessing.get_context("fork").Process(target=_run_in_fork, args=process_arguments)
        self._process.start()
        self.pid = self._process.pid or 0
        self._began = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    @property
    def code(self) -> int | None:
        """The exit code as a shell has it (128 + n after signal n). None while the program runs."""
        exit_code = self._process.exitcode
        return exit_code if exit_code is None or exit_code >= 0 else 128 - exit_code

    @property
    def text(self) -> str:
        """The output so far, of both streams."""
        return os.pread(self._output.fileno(), MAX_OUTPUT_BYTES, 0).decode(errors="replace")

    def wait(self, seconds: float, ready: Callable[[], Any] = lambda: False) -> int | None:
        """Wait for the end, for `seconds`, or until `ready` returns a true value.

        Returns:
            the exit code, or None if the program still runs.
        """
        until = time.monotonic() + seconds
        while self.code is None and time.monotonic() < until and not ready():
            time.sleep(0.01)
        return self.code

    def members(self) -> dict[int, int]:
        """Return the living processes of the session, orphans too, oldest first: pid -> parent's pid."""
        processes = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended meanwhile
                pid, fields = int(folder.name), stat_of(int(folder.name))
                if int(fields[3]) == self.pid and fields[0] not in "ZX":
                    processes.append((int(fields[19]), pid, int(fields[1])))
        return {pid: parent for _, pid, parent in sorted(processes)}

    def ranks(self) -> list[int]:
        """Return the pids of the workers, rank zero first.

        Workers are forks of the parent. Its other children, such as `git`, have another command line.
        """
        command = command_of(self.pid)
        return [pid for pid, parent in self.members().items() if parent == self.pid and command_of(pid) == command]

    def kill_remaining(self, seconds: float) -> set[str]:
        """Kill the processes that remain after `seconds`. Return their command lines."""
        until = time.monotonic() + seconds
        while (members := self.members()) and time.monotonic() < until:
            time.sleep(0.05)
        commands = {command_of(pid) for pid in members}
        self.strike(signal.SIGKILL, *members)
        return commands

    def strike(self, signum: int, *pids: int) -> None:
        """Send a signal to processes. Skip those that have ended."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def close(self) -> None:
        """Kill all remaining processes and close the output."""
        self.kill_remaining(0)
        self.wait(5)
        self._output.close()


def stat_of(pid: int) -> list[str]:
    """Return what /proc/<pid>/stat has after the program's name: state, parent's pid, group, session and more."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def command_of(pid: int) -> str:
    """Return a process's command line; an empty string if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    return ""


def _run_in_fork(program: str, arguments: list[str], prefix: Sequence[str], output: int) -> None:
    """Do in a fork what `python src/train.py` does."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    if prefix:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "scripts" / "lab"), os.environ.get("PYTHONPATH", "")])
        os.execvp(prefix[0], [*prefix, f"src/{program}.py", *arguments])
    sys.argv = [f"{program}.py", *arguments]
    if program == "train":
        from lockstep import command

        command(importlib.import_module("train").train, str(ROOT / "src" / "train.py"))
    sys.exit(importlib.import_module(f"lockstep.programs.{program}").main(arguments))
