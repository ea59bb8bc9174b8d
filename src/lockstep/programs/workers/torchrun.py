"""Run torchrun, whose workers are forks of a process that has imported everything:

    python -m lockstep.programs.workers.torchrun <arguments of torchrun>

A worker that is a new Python process imports torch, Lightning and Hydra for seconds, after each restart again, while
all other machines wait for it. Here a process imports them before it joins the others, and becomes torchrun's agent.
Its fork serves forks of itself: the agent starts fork.py for each worker, which stands for one of them.

The server has one thread, and neither computes nor touches a GPU, so it may fork. It ends with the agent, and its
workers end with it. The code of a worker is that of the time at which torchrun was started. Linux only.
"""

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    from lockstep import standard_streams

    standard_streams.protect()

from lockstep.launch.signals import set_parent_death_signal

# What src/train.py imports sooner or later, but for a project's own code: each worker takes that from its project. The
# first one sets what torch reads when it is imported.
IMPORTS = (
    "lockstep",
    "torch.distributed.run",
    "lockstep.commands.cli",
    "lockstep.job.supervisor",
    "lockstep.job.training",
    "lockstep.report.summary",
    "torch.utils.tensorboard",
    "sklearn.datasets",
    "lockstep.vision.models",
)
FORKS = "LOCKSTEP_FORKS"  # the name of the server's socket, and a Python for other programs; see fork.py
DESCRIPTORS = 3  # standard input, output and error
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    gc.disable()
    for module in IMPORTS:
        with suppress(ImportError):  # a user may have deleted it; the worker's own import has the message
            importlib.import_module(module)
    gc.freeze()
    name = f"lockstep-{uuid.uuid4().hex}"
    agent, listener = os.getpid(), socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen()
    if os.fork() == 0:
        set_parent_death_signal(agent)
        for number in SIGNALS:  # the agent ends its workers, and then the server ends with it
            signal.signal(number, signal.SIG_IGN)
        serve(listener)
    listener.close()
    gc.enable()
    os.environ |= {"PYTHON_EXEC": executable(Path(__file__).with_name("fork.py")), FORKS: f"{name} {sys.executable}"}
    exit_after(importlib.import_module("torch.distributed.run").main)


def executable(file: Path) -> str:
    """Return a path at which other processes may execute a file while this one lives.

    A wheel's files are installed without permission to execute them.
    """
    copy = os.memfd_create(file.name)
    os.write(copy, file.read_bytes())
    return f"/proc/{os.getpid()}/fd/{copy}"


def serve(listener: socket.socket) -> None:
    """Fork a worker for each connection. Kill it when the connection ends. Send its wait status when it has ended."""
    wakeup, wakeup_end = socket.socketpair()
    for end in (wakeup, wakeup_end):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_end.fileno(), warn_on_full_buffer=False)
    workers: dict[int, socket.socket] = {}  # by process id
    with selectors.DefaultSelector() as ready:
        ready.register(listener, selectors.EVENT_READ)
        ready.register(wakeup, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                source: Any = key.fileobj
                if source is wakeup:
                    wakeup.recv(1024)
                    for pid, status in ended_children():
                        with suppress(KeyError, OSError), workers.pop(pid) as connection:
                            ready.unregister(connection)
                            connection.sendall(struct.pack("i", status))
                elif source is listener:
                    connection, _ = listener.accept()
                    if pid := fork_worker(connection, [listener, wakeup, wakeup_end, *workers.values()]):
                        workers[pid] = connection
                        ready.register(connection, selectors.EVENT_READ, pid)
                elif workers.get(key.data) is source:  # the program that stands for the worker has ended
                    os.kill(key.data, signal.SIGKILL)
                    ready.unregister(workers[key.data])


def ended_children() -> list[tuple[int, int]]:
    """Return process id and wait status of the children that have ended."""
    ended = []
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(child)
    return ended


def fork_worker(connection: socket.socket, inherited: Sequence[socket.socket]) -> int:
    """Fork a worker, and send its process id. Return it, or 0 if another user's program is at the other end.

    Args:
        inherited: sockets of this process, which the fork closes.
    """
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        if user != os.getuid():
            raise OSError("another user")
        start, descriptors = receive(connection)
    except (OSError, ValueError):
        connection.close()
        return 0
    server, pid = os.getpid(), os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for each in (connection, *inherited):
            each.close()
        set_parent_death_signal(server)
        run_worker(start, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    with suppress(OSError):
        connection.sendall(struct.pack("i", pid))
    return pid


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return what fork.py sends: arguments, environment and folder, and its standard streams."""
    connection.settimeout(10)
    head, descriptors, _, _ = socket.recv_fds(connection, 8, DESCRIPTORS)
    size = int.from_bytes(head, "big")
    content = b""
    while len(content) < size and (part := connection.recv(size - len(content))):
        content += part
    connection.settimeout(None)
    return json.loads(content), descriptors


def run_worker(start: dict[str, Any], descriptors: list[int]) -> None:
    """Run a program in this fork as `python -u <program> <arguments>` would. Exit with its code."""
    for number in (*SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for stream, descriptor in enumerate(descriptors):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(start["environment"])
    os.chdir(start["folder"])
    os.setsid()
    for output in (sys.stdout, sys.stderr):
        output.reconfigure(write_through=True)  # type: ignore[union-attr]
    import lockstep
    from lockstep.launch.environment import environment

    environment.cache_clear()
    lockstep.command_started_at = time.time()
    gc.enable()
    program, *arguments = start["arguments"]
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).resolve().parent)
    exit_after(lambda: runpy.run_path(program, run_name="__main__"))


def exit_after(program: Callable[[], Any]) -> NoReturn:
    """Call a program, and exit as Python would after it, but without Python's teardown."""
    code = 0
    try:
        program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
