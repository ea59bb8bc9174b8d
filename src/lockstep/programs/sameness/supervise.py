"""Run a command, and end all processes that it leaves: python supervise.py 'command'. Standard library only.

`lockstep same` starts this program by its path. It ends with the exit code of the command. On SIGTERM, which the kernel
also sends when `lockstep same` dies in any way, it kills all descendants: also those in sessions of their own, as
torchrun's, and those whose parents have ended, which the kernel hands to this process.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PDEATHSIG, CHILD_SUBREAPER = 1, 36  # of prctl, Linux
SECONDS = 10.0  # for the killed processes to end


def children() -> dict[int, list[int]]:
    """Return the processes of this machine by their parent."""
    by_parent: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                by_parent.setdefault(int(fields[1]), []).append(int(entry.name))
    return by_parent


def descendants() -> list[int]:
    by_parent, result = children(), [os.getpid()]
    for pid in result:
        result += by_parent.get(pid, [])
    return result[1:]


def end_all() -> None:
    """Kill all descendants, and wait for them."""
    end = time.monotonic() + SECONDS
    while (left := descendants()) and time.monotonic() < end:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def stop(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_all()
    os._exit(128 + signal.SIGTERM)


def main() -> NoReturn:
    parent = int(sys.argv[1])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    with suppress(OSError, AttributeError):  # another system than Linux
        libc = ctypes.CDLL(None)
        libc.prctl(CHILD_SUBREAPER, 1)
        libc.prctl(PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)
    process = subprocess.Popen(["/bin/sh", "-c", sys.argv[2]], stdin=subprocess.DEVNULL, start_new_session=True)
    code = process.wait()
    end_all()
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
