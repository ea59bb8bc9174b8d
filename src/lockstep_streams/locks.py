"""Locks of files, among all processes and users of a machine."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which ends with the process. Without locks (some NFS, FUSE) go on without."""
    lock = FileLock(path, mode=0o666)
    with contextlib.suppress(OSError):
        lock.acquire()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.release()
