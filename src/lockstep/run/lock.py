"""One process at a time writes a run's folder, or a sweep's: it holds a lock on a file in there.

The lock is POSIX's (`fcntl.lockf`). The kernel takes it back when the process ends, however it ends, so what a killed
run leaves behind is a file that means nothing. It belongs to one process: workers, which are forked, neither hold it
nor release it when they close what they inherited (with `flock` a worker that outlives its parent for a moment would
hold it on). NFS passes it on to its server, so it counts on all machines that share the folder. There, the server
gives back the lock of a machine that has died only after a while, which is one reason why a restarted run waits.

A process loses the lock when it closes the file by any other descriptor, so nothing else opens it.
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
WAIT_SECONDS = 2.0  # for a run that is just ending
RESTART_WAIT_SECONDS = 120.0  # for a run that an engine has started again; NFS gives a dead client 90

_locked: set[str] = set()  # folders of this process
os.register_at_fork(after_in_child=_locked.clear)


class FolderBusy(UserError):
    """Another process works in the folder, so nothing in it may be touched."""


@contextmanager
def lock_folder(folder: Path, writes: bool = True) -> Iterator[None]:
    """Hold the lock of a folder, which is made where it does not exist.

    Args:
        folder: of a run or a sweep.
        writes: whether this process is the one that writes the folder; others hold nothing. Of workers that exist
            already all call this, and get rank zero's refusal.

    Raises:
        FolderBusy: another process holds it; the message says which.
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
    finally:
        for descriptor in descriptors:
            _locked.discard(os.path.realpath(folder))
            os.close(descriptor)


def _acquire(folder: Path) -> int:
    """Return the open lock file, once this process has the lock."""
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
                print(f"{path}: can't be locked ({error.strerror}): a second run here is not refused", file=sys.stderr)
                return descriptor
            os.close(descriptor)
            if time.monotonic() > until:
                raise FolderBusy(f"{folder}: {holder} works in this folder: wait for its end, or end it") from None
            time.sleep(0.2)
            continue
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                _write_owner(descriptor)
                return descriptor
        os.close(descriptor)  # who held it has removed the folder


def _write_owner(descriptor: int) -> None:
    """Write who holds the lock, for the message of those who don't get it."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    text = json.dumps({"host": platform.node(), "process": os.getpid(), "since": since})
    with suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _read_owner(descriptor: int) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {int(record['process'])} on {record['host']} (since {record['since']})"
    return "another process"
