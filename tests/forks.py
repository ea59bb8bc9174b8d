"""Programs as forks of an interpreter that has imported the libraries, three of a run's four seconds.

The server imports nothing of the project: a program is compiled, imported and run as `python <script>` would, and is a
process with a session, an environment and an output of its own; `-m` and a module are taken, too. What such a program
can't show is how long it takes to start, what it imports, what an interpreter takes from its environment (PYTHONPATH, a
hash seed of its own), and how it takes itself apart: that takes two seconds, so a program ends after all `atexit`.
"""

import atexit
import gc
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import once

CODE = 1  # with which a program ends, or minus the signal: that of an exception, unless another is set
ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "src" / "lockstep" / "conf", ROOT / "conf")
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
    once.do_ahead(LIBRARIES, PAGES)
    gc.freeze()
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # who waited for a program that has ended
                pass
        if not message:
            os._exit(0)
        if os.fork() == 0:
            break
        for file in files:
            os.close(file)
    requests.close()
    *streams, status = files
    if program := os.fork():
        for file in streams:
            os.close(file)
        code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        os.write(status, f"{code}\n".encode())
        os._exit(0)
    os.setsid()
    os.write(status, f"{os.getpid()}\n".encode())
    os.close(status)
    for number, file in enumerate(streams, 1):
        os.dup2(file, number)
        os.close(file)
    arguments, folder, environment = json.loads(message)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None
    sys.argv[:] = arguments
    sys.path[0] = str(Path(arguments[0]).parent)


# --- its client -------------------------------------------------------------------------------------------------------


class Server:
    """The interpreter that is forked. `start` starts it, as Popen does: on another machine, say."""

    def __init__(self, start: Callable[..., subprocess.Popen[Any]] = subprocess.Popen) -> None:
        self.asks, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = start([sys.executable, __file__], stdin=theirs.fileno(), start_new_session=True)

    def close(self) -> None:
        """End it; programs that it has started continue."""
        self.asks.close()
        self.process.wait()


@cache
def _here() -> Server:
    return Server()


def close() -> None:
    """End the server of this machine, if there is one."""
    if _here.cache_info().currsize:
        _here().close()
        _here.cache_clear()


class Fork:
    """A running program; what a test needs of subprocess.Popen[str], whose words it has."""

    def __init__(self, args: Sequence[str], cwd: Path, env: dict[str, str], server: Server | None = None) -> None:
        sys.audit("lockstep.start", args)  # the server starts it: see kinds.py
        self.args = args
        pipes = [os.pipe() for _ in range(3)]
        socket.send_fds(
            (server or _here()).asks, [json.dumps([args, str(cwd), env]).encode()], [end for _, end in pipes]
        )
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
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # nobody reads, it is closed, or the program has removed it
            stream.flush()
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
