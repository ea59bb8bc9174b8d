"""A folder for what a run's processes keep for a moment, gone with them: also when they were killed."""

from __future__ import annotations

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
LONGEST = 107 - len("/lockstep_12345678/pymp-12345678/listener-12345678")  # bytes: a socket's path has 107


@contextmanager
def scratch_folder() -> Iterator[str]:
    """While it lasts, temporary files of this process and of its forks go to a folder of their own.

    Its lock is held by all of them, so a folder that nobody holds was left by processes that were killed: the next run
    on the machine removes it, when it begins or (they may not be gone yet) when it ends. It lies in the usual place;
    where that has so long a name that sockets don't fit (data loaders would hang), in /tmp.
    """
    before = tempfile.tempdir
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) > LONGEST:
        place = "/tmp"
    _remove_left(place)
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=place)
    with open(Path(folder, "lock"), "wb") as lock_file:
        _lock(lock_file)
        tempfile.tempdir = folder
        try:
            yield folder
        finally:
            tempfile.tempdir = before
            shutil.rmtree(folder, ignore_errors=True)
            _remove_left(place)


@contextmanager
def outside() -> Iterator[None]:
    """While it lasts, temporary files go where the scratch folder lies: for what should outlive the run."""
    before, place = tempfile.tempdir, tempfile.gettempdir()
    tempfile.tempdir = os.path.dirname(place) if os.path.basename(place).startswith(PREFIX) else place
    try:
        yield
    finally:
        tempfile.tempdir = before


def can_write() -> bool:
    """Whether a message of some length could be left in a temporary file."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(1 << 16))
    except OSError:
        return False
    return True


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
