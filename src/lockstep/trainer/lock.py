"""The lock of a run's folder, by which it has one run at a time. This module imports neither torch nor Lightning.

It is a lock on a file in the folder (see `lockstep.files`). Forks close the file, so the lock ends with the process
that has taken it, also if a worker outlives it. A restarted run waits longer, because a server of NFS releases the lock
of a dead machine only after a while.
"""

import json
import os
import platform
import sys
import time
from contextlib import suppress
from pathlib import Path

from lockstep.files import has_name, try_lock
from lockstep.launch.environment import environment

WAIT_SECONDS = 2.0  # time for another run to end
RESTART_WAIT_SECONDS = 120.0  # after a restart by torchrun or SLURM; NFS waits 90 s for a dead client

_held: dict[str, int] = {}  # descriptors of the files that this process has locked, by the file


def _close_in_fork() -> None:
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_close_in_fork)


def holds(file: Path) -> bool:
    """Check whether this process has locked a file."""
    return os.path.realpath(file) in _held


def take(file: Path) -> str:
    """Lock a file until `release` or the end of the process. Make it, and its folder, if it does not exist.

    On a file system without locks the file counts as locked.

    Returns:
        Empty; or the process that has locked the file, in words.

    Raises:
        OSError: the file can't be made.
    """
    if holds(file):
        return ""
    restarted = environment().restarts or environment().slurm_restarts
    until = time.monotonic() + (RESTART_WAIT_SECONDS if restarted else WAIT_SECONDS)
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            is_locked = try_lock(descriptor)
        except OSError as error:
            is_locked = True
            why = f"can't be locked ({error.strerror})"
            print(f"{file}: {why}: do not start a second run in this folder", file=sys.stderr)
        if is_locked and has_name(descriptor, file):
            _write_owner(descriptor)
            _held[os.path.realpath(file)] = descriptor
            return ""
        holder = "" if is_locked else _read_owner(descriptor)
        os.close(descriptor)
        if not is_locked:  # otherwise the last owner has removed the file
            if time.monotonic() > until:
                return holder
            time.sleep(0.1)


def release(file: Path) -> None:
    """Unlock a file that this process has locked."""
    os.close(_held.pop(os.path.realpath(file)))


def _write_owner(descriptor: int) -> None:
    """Write the owner of the lock into the file, for the message of processes that do not get the lock."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    text = json.dumps({"host": platform.node(), "process": os.getpid(), "since": since})
    with suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _read_owner(descriptor: int) -> str:
    """Return the owner of the lock as text."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {int(record['process'])} on {record['host']} (since {record['since']})"
    return "another process"
