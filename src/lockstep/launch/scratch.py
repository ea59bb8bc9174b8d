"""A temporary folder for a run's processes. It is removed after the run, even if the processes were killed."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PREFIX = "lockstep_"
# A socket's path has at most 107 bytes, and data loaders put sockets into subfolders.
MAX_PATH_BYTES = 107 - len("/lockstep_12345678/pymp-12345678/listener-12345678")


@contextmanager
def scratch_folder() -> Iterator[str]:
    """Create a temporary folder, yield its path, and remove it afterwards.

    It lies in the default folder for temporary files; in /tmp if that path is too long for the sockets of data loaders,
    which would hang.

    This process and its forks hold a lock on the folder. A folder without a lock was left by processes that were
    killed. The next run on the machine removes it: at its start, or at its end if the processes still existed then.
    """
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > MAX_PATH_BYTES:
        parent = "/tmp"
    _remove_abandoned(parent)
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    with open(Path(folder, "lock"), "wb") as lock_file:
        _lock(lock_file)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            _remove_abandoned(parent)


def _remove_abandoned(parent: str) -> None:
    """Remove the folders in `parent` that killed processes left behind."""
    for lock in Path(parent).glob(f"{PREFIX}*/lock"):
        with suppress(OSError), open(lock, "rb") as file:  # it may be removed by now, or belong to another user
            young = time.time() - os.fstat(file.fileno()).st_mtime < 1  # its owner may not have locked it yet
            if not young and _lock(file):
                shutil.rmtree(lock.parent, ignore_errors=True)


def _lock(file: IO[bytes]) -> bool:
    """Lock a file until every process that has it open exits. Return False if another process has the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
