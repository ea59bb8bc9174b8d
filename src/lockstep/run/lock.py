"""Lock the folder of a run or a sweep, so that one process at a time writes it.

The lock is a POSIX lock (`fcntl.lockf`) on a file in the folder. The kernel releases it when the process ends, however
it ends, so the file that a killed run leaves behind has no effect. Forked workers do not inherit it, and do not release
it when they close the inherited descriptor. (A `flock` would stay locked while a worker outlives its parent.) NFS sends
the lock to its server, so it works on all machines that share the folder. The server releases the lock of a dead
machine only after a while, which is one reason why a restarted run waits.

A process loses the lock when it closes any other descriptor of the file, so nothing else opens the file.
"""

import errno
import fcntl
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.errors import UserError
from lockstep.launch.environment import environment, external_workers
from lockstep.launch.process_group import broadcast_from_rank_zero

NAME = ".lock"
WAIT_SECONDS = 2.0  # time for another run to end
RESTART_WAIT_SECONDS = 120.0  # after a restart by torchrun or SLURM; NFS waits 90 s for a dead client

_locked: set[str] = set()  # folders that this process has locked
os.register_at_fork(after_in_child=_locked.clear)


class FolderBusy(UserError):
    """Another process writes the folder, so this one must not change it."""


@contextmanager
def lock_folder(folder: Path, writes: bool = True) -> Iterator[None]:
    """Hold the lock of a folder. Make the folder if it does not exist.

    Among the workers of an engine all must call this. Rank zero takes the lock, and all raise its error.

    Args:
        folder: the folder of a run or a sweep.
        writes: whether this process writes the folder; other processes take no lock.

    Raises:
        FolderBusy: Another process holds the lock. The message names it.
    """
    descriptors: list[int] = []

    def take() -> None:
        if (name := os.path.realpath(folder)) not in _locked:
            descriptors.append(_acquire(folder))
            _locked.add(name)

    if external_workers():
        refused = ""
        try:
            if environment().rank == 0:
                take()
        except UserError as refusal:
            refused = str(refusal)
        if refused := broadcast_from_rank_zero(refused):
            raise FolderBusy(refused)
    elif writes:
        take()
    try:
        yield
    except BaseException:
        if external_workers():  # this process ends soon, but still has files of the folder open: it keeps the lock
            descriptors.clear()
        raise
    finally:
        for descriptor in descriptors:
            _locked.discard(os.path.realpath(folder))
            os.close(descriptor)


def _acquire(folder: Path) -> int:
    """Wait for the lock. Return the descriptor of the lock file."""
    path = folder / NAME
    restarted = environment().restarts or environment().slurm_restarts
    until = time.monotonic() + (RESTART_WAIT_SECONDS if restarted else WAIT_SECONDS)
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _read_owner(descriptor)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                why = f"can't be locked ({error.strerror})"
                print(f"{path}: {why}: do not start a second run in this folder", file=sys.stderr)
                return descriptor
            os.close(descriptor)
            if time.monotonic() > until:
                raise FolderBusy(f"{folder}: {holder} works in this folder: wait until it ends, or stop it") from None
            time.sleep(0.2)
            continue
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                _write_owner(descriptor)
                return descriptor
        os.close(descriptor)  # the last owner has removed the folder


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
