"""A folder for what a run's processes keep for a moment, gone with them: also when they were killed."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lockstep.launch.environment import SCRATCH, export

PREFIX = "lockstep_"
LONGEST = 107 - len("/lockstep_12345678/pymp-12345678/listener-12345678")  # bytes: a socket's path has 107


@contextmanager
def scratch_folder() -> Iterator[str]:
    """A folder where temporary files usually lie; where that has so long a name that the data loaders' sockets don't
    fit (they would hang), in /tmp.

    Its lock is held by this process and its forks, so a folder that nobody holds was left by processes that were
    killed: the next run on the machine removes it, when it begins or (they may not be gone yet) when it ends.
    """
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) > LONGEST:
        place = "/tmp"
    _remove_left(place)
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=place)
    with open(Path(folder, "lock"), "wb") as lock_file:
        _lock(lock_file)
        export(**{SCRATCH: folder})  # for the workers
        try:
            yield folder
        finally:
            export(**{SCRATCH: ""})
            shutil.rmtree(folder, ignore_errors=True)
            _remove_left(place)


def _remove_left(place: str) -> None:
    for lock in Path(place).glob(f"{PREFIX}*/lock"):
        with suppress(OSError), open(lock, "rb") as file:  # gone meanwhile, or another user's
            young = time.time() - os.fstat(file.fileno()).st_mtime < 1  # its owner may not have locked it yet
            if not young and _lock(file):
                shutil.rmtree(lock.parent, ignore_errors=True)


def _lock(file: IO[bytes]) -> bool:
    """Takes the lock of a file until all that have it open are gone; False where another holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
