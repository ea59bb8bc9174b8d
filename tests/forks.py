"""Programs as forks of an interpreter that has imported the libraries, three of a run's four seconds.

A program is compiled, imported and run as `python <script>` would. If its folder has its own `lockstep`, that one is
imported. It is a process with a session, an environment and an output of its own; `-m` and a module are taken, too.
What such a program can't show is how long it takes to start, what it imports, what Lockstep prints while it is
imported, what an interpreter takes from its environment (PYTHONPATH, a hash seed of its own), packages that lie in its
own folder and say which versions they are, that Hydra composes each config twice, and how an interpreter takes itself
apart: that takes two seconds, so a program ends after all `atexit`.
"""

import atexit
import gc
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import numpy as np
import once

CODE = 1  # a program's exit code, or minus its signal; 1: an exception that nobody catches
ROOT = Path(__file__).resolve().parent.parent
# What `src/train.py` imports beside the modules of commands, which store the time of their import.
LOCKSTEP = ("lockstep.job.training", "lockstep.job.run_folder", "lockstep.checkpoint.callback")
PAGES = (*(ROOT / "src").glob("lockstep*/conf"), ROOT / "conf")
LIBRARIES = (
    "hydra._internal.hydra",
    "lightning.pytorch",
    "matplotlib.backends.backend_agg",
    "matplotlib.pyplot",
    "optuna",
    "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin",
    "pydantic.dataclasses",
    "pydantic.json_schema",
    "pydantic.type_adapter",
    "s3fs",  # Lightning imports it to see whether a folder is on a server
    "tensorboard.plugins.hparams.plugin_data_pb2",
    "torch.utils.tensorboard",
    "torchmetrics.classification",
    "torchvision",
    "tqdm.contrib.logging",
)


# --- the server -------------------------------------------------------------------------------------------------------


def serve(requests: socket.socket) -> None:
    """Serve requests; return in each fork, as the program that it shall run: its arguments, environment and place
    are set."""
    atexit.register(end)  # before all others, so it is called after them
    once.do_ahead((*LIBRARIES, *LOCKSTEP), PAGES)
    from lockstep.config.check import check_keys
    from lockstep.data.build import check_data
    from lockstep.errors import UserError

    for check in (check_keys, check_data):
        with suppress(UserError):  # pydantic prepares a check when it is first made
            check("", {})
    gc.freeze()
    programs: dict[int, int] = {}  # those that run, and where their ends are reported
    woken, wake = os.pipe()
    clients: list[Any] = [requests]
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while clients or programs:
        ready = select.select([*clients, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 1 << 10)
            report(programs)
        if requests not in ready:
            continue
        message, files, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            clients.clear()
            continue
        *streams, status = files
        if (program := os.fork()) == 0:
            break
        programs[program] = status
        for file in streams:
            os.close(file)
    else:
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.write(status, f"{os.getpid()}\n".encode())
    for file in (requests.detach(), woken, wake, status, *programs.values()):
        os.close(file)
    for number, file in enumerate(streams, 1):
        os.dup2(file, number)
        os.close(file)
    arguments, folder, environment = json.loads(message)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None
    sys.argv[:] = arguments
    sys.path[0] = folder if arguments[0] == "-m" else str(Path(arguments[0]).parent)
    np.random.seed()  # noqa: NPY002 # else it is in the state of the server in all programs
    take_lockstep()


def report(programs: dict[int, int]) -> None:
    """Report the programs that have ended."""
    for program in [*programs]:
        ended, code = os.waitpid(program, os.WNOHANG)
        if ended:
            status = programs.pop(program)
            with suppress(BrokenPipeError):  # who has started it is gone
                os.write(status, f"{os.waitstatus_to_exitcode(code)}\n".encode())
            os.close(status)


def take_lockstep() -> None:
    """Keep what was imported of Lockstep for its commands and a project's programs, if it is what they would import.

    Another folder may have its own, and a script may change files of Lockstep before it imports them.
    """
    theirs = PathFinder.find_spec("lockstep", sys.path)
    same = theirs is not None and theirs.origin == sys.modules["lockstep"].__file__
    if same and (sys.argv[0] == "-m" or Path(sys.path[0]).name == "src"):
        vars(sys.modules["lockstep"])["command_started_at"] = time.time()
        return
    for name in [*sys.modules]:
        if name.startswith("lockstep"):
            del sys.modules[name]


# --- its client -------------------------------------------------------------------------------------------------------


@cache
def server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Return where to ask the interpreter that is forked, and its process."""
    asks, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        return asks, subprocess.Popen([sys.executable, __file__], stdin=theirs.fileno(), start_new_session=True)


def close() -> None:
    """End the server, if there is one. Programs that it has started go on, and so does it until they have ended."""
    if server.cache_info().currsize:
        asks, process = server()
        asks.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        server.cache_clear()


class Fork:
    """A running program; what a test needs of subprocess.Popen[str], whose words it has."""

    def __init__(self, args: Sequence[str], cwd: Path, env: dict[str, str]) -> None:
        sys.audit("lockstep.start", args)  # the server starts it: see kinds.py
        self.args = args
        pipes = [os.pipe() for _ in range(3)]
        socket.send_fds(server()[0], [json.dumps([args, str(cwd), env]).encode()], [end for _, end in pipes])
        for _, end in pipes:
            os.close(end)
        *streams, status = (os.fdopen(end, errors="replace") for end, _ in pipes)
        self.pid = int(status.readline())
        pool = ThreadPoolExecutor(3)
        self._end: Future[str] = pool.submit(status.read)
        self._last_words = [pool.submit(stream.read) for stream in streams]
        pool.shutdown(wait=False)

    def poll(self) -> int | None:
        return int(self._end.result()) if self._end.done() else None

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        until = None if timeout is None else time.monotonic() + timeout
        try:
            self._end.result(timeout)
            left = [output.result(until and max(0, until - time.monotonic())) for output in self._last_words]
        except NotYet:
            raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
        return left[0], left[1]

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def end() -> None:
    """End this process, whose other threads have ended. Its output is written."""
    logging.shutdown()
    for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
        with suppress(OSError, ValueError, AttributeError):  # nobody reads, it is closed, or the program has removed it
            stream.flush()  # type: ignore[union-attr]
    if CODE < 0:
        signal.signal(-CODE, signal.SIG_DFL)
        os.kill(os.getpid(), -CODE)
    os._exit(CODE)


def run(arguments: list[str]) -> None:
    """Run a program as `__main__`."""
    global CODE
    try:
        if arguments[0] == "-m":
            del arguments[0]
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
        CODE = 0
    except SystemExit as error:
        CODE = error.code & 255 if isinstance(error.code, int) else int(error.code is not None)
        raise
    except KeyboardInterrupt:
        CODE = -signal.SIGINT
        raise


if __name__ == "__main__":
    requests = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    serve(requests)
    run(sys.argv)
