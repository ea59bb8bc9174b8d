#!/usr/bin/env -S python3 -I -S
"""Stand for a worker that torchrun.py forks: torchrun starts this program as its Python.

It sends arguments, environment, folder and standard streams, passes signals on, and ends as the worker ends. When it is
killed, the worker is killed.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import sys


def main() -> None:
    name, _, python = os.environ["LOCKSTEP_FORKS"].partition(" ")
    arguments = sys.argv[1:]
    if arguments[0] == "-u":
        arguments.pop(0)
    if arguments[0].startswith("-"):  # torchrun -m <module>
        os.execv(python, [python, *sys.argv[1:]])
    for stream in (0, 1, 2):  # in this order: a new descriptor is the lowest free one
        try:
            os.fstat(stream)
        except OSError:  # it is closed
            os.open(os.devnull, os.O_RDWR)
    server = socket.socket(socket.AF_UNIX)
    server.connect(f"\0{name}")
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCKSTEP_FORKS", "PYTHON_EXEC")}
    content = json.dumps({"arguments": arguments, "environment": environment, "folder": os.getcwd()}).encode()
    socket.send_fds(server, [len(content).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(content)
    worker = read(server)

    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
        signal.signal(number, forward)
    status = read(server)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # end by the same signal
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def read(server: socket.socket) -> int:
    message = server.recv(4)
    if not message:
        os._exit(1)  # the server has ended, and the worker with it
    number: int = struct.unpack("i", message)[0]
    return number


if __name__ == "__main__":
    main()
