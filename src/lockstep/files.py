"""Atomic writes and locks. Standard library only.

After a kill at any moment, a file is either the old one or the new one.

All locks of Lockstep are here, and of one kind: `flock`. The kernel releases one when the last process that has the
open file exits or closes it, however it exits, so a file that a killed process leaves behind has no effect. A fork
inherits the lock; where only the process that took it may have it, the fork closes the file (trainer/lock.py). Linux
sends such a lock on NFS to the server as one of the whole file, so it holds among all machines that share the folder;
the server releases the lock of a dead machine only after a while. Some file systems have no locks: then `try_lock`
raises an OSError, and the caller decides what that means.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` when the block ends. After an error, `path` is unchanged.

    The temporary file is in the same folder, because a move between file systems is a copy, which a kill can interrupt.
    Its name is fixed, so the next write removes what a killed process left. While one process writes it, another one
    takes a name of its own. A symbolic link with the temporary name is not followed: in an untrusted folder it may
    point anywhere.

    Args:
        path: the file to replace. Missing parent folders are created.

    Yields:
        The open file, in binary mode.

    Raises:
        OSError: the file can't be written. The error names `path` and the reason (disk full, read-only, ...).
    """
    path, temporary = Path(path), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _open_temporary(path) as file:
            temporary = Path(file.name)
            yield file
            file.flush()
            os.fsync(file.fileno())
            _publish(temporary, path)  # before the file is closed, and with it unlocked
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        if isinstance(error, OSError) and error.filename != str(path):
            raise type(error)(error.errno, f"can't write ({error.strerror})", str(path)) from error
        raise


def write(path: str | os.PathLike[str], content: bytes | memoryview) -> None:
    """Write `content` to `path` atomically; raise what `replacing` raises."""
    with replacing(path) as file:
        file.write(content)


def link_file(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Make `path` a hard link to `source`, or a copy where the file system has no hard links. Both are atomic."""
    path = Path(path)
    if path.exists() and path.samefile(source):
        return  # a rename between two links of one file does nothing, so the temporary link would stay
    temporary = _beside(path)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        with open(source, "rb") as original, replacing(path) as copy:
            shutil.copyfileobj(original, copy, 1 << 20)
    else:
        _publish(temporary, path)


def try_lock(descriptor: int) -> bool:
    """Lock a file until all processes that have it open exit or close it. Return False if another one has the lock.

    Raises:
        OSError: the file system has no locks (ENOLCK, ENOTSUP, ENOSYS).
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a folder, or of a file, which is created for all users. Where there are no locks: go on."""
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o666)
            opened.callback(os.close, descriptor)
            if flags & os.O_CREAT:
                with contextlib.suppress(PermissionError):  # another user has created it
                    os.fchmod(descriptor, 0o666)  # whatever the umask is
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _open_temporary(path: Path) -> IO[bytes]:
    """Create and lock the temporary file of `path`; one with another name if another process writes it now."""
    for temporary in (_beside(path), path.with_name(f".{path.name}.{os.getpid()}.tmp")):
        with contextlib.suppress(FileExistsError):  # another process has just made it
            if _remove_left_behind(temporary):
                file = open(temporary, "xb")  # noqa: SIM115  the caller closes it
                if _is_written_here(file.fileno(), temporary):
                    return file
                file.close()  # another process took it for one that was left behind
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(temporary))


def _is_written_here(descriptor: int, temporary: Path) -> bool:
    """Lock an open temporary file. Return False if another process writes it, or has renamed or removed it meanwhile.

    On a file system without locks it counts as locked.
    """
    try:
        return try_lock(descriptor) and has_name(descriptor, temporary)
    except OSError:
        return has_name(descriptor, temporary)


def has_name(descriptor: int, path: Path) -> bool:
    """Check whether an open file still has a name: meanwhile another process may have renamed or removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _remove_left_behind(temporary: Path) -> bool:
    """Remove a temporary file that a killed process has left. Return False if a process writes it now."""
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except OSError:  # it is a link
        temporary.unlink(missing_ok=True)
        return True
    try:
        if not _is_written_here(descriptor, temporary):
            return False
        temporary.unlink(missing_ok=True)  # its lock is held meanwhile, so a process that just made it takes another
        return True
    finally:
        os.close(descriptor)


def _beside(path: Path) -> Path:
    """Return the temporary file of `path`, in the same folder."""
    return path.with_name(f".{path.name}.tmp")


def _publish(temporary: Path, path: Path) -> None:
    """Rename a complete temporary file to `path`, durably."""
    os.replace(temporary, path)
    sync_folder(path.parent)  # the rename is durable only after that


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
