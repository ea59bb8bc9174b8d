"""Programs as forks of an interpreter that has imported the libraries, three of a run's four seconds.

The server imports nothing of the project: a program is compiled, imported and run as `python <script>` would, and is a
process with a session, an environment and an output of its own; `-m` and a module are taken, too. What such a program
can't show is how long it takes to start, what it imports, and what an interpreter takes from its environment
(PYTHONPATH, a hash seed of its own).
"""

import atexit
import gc
import importlib
import json
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
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()
    atexit.register(gc.unfreeze)  # else what C++ made looks leaked when an interpreter takes itself apart
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


if __name__ == "__main__":
    requests = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    serve(requests)
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
