"""Files that are either the old one or the new one, whenever the process dies. Standard library only."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file whose content takes the place of `path` when the block ends well; after an error `path` is untouched.

    The temporary file lies in the same folder (a move between file systems is a copy, and a copy can be cut in half)
    and has one fixed name, so that what a killed process left behind is removed by the next. One writer at a time. A
    link that lies there instead is not followed: in a stranger's folder it may lead anywhere.

    Raises:
        OSError: naming `path` and the reason (disk full, read-only, ...).
    """
    path = Path(path)
    temporary = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename != str(path):
            raise type(error)(error.errno, f"can't write ({error.strerror})", str(path)) from error
        raise


def write(path: str | os.PathLike[str], content: bytes | memoryview) -> None:
    """Write a file atomically, as `replacing` does."""
    with replacing(path) as file:
        file.write(content)


def same_file(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Make `path` the file that `source` is now: a hard link, or a copy where the file system has no links."""
    path = Path(path)
    if path.exists() and path.samefile(source):
        return  # renaming one name of a file to another does nothing, and would leave the temporary
    temporary = _beside(path)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        with open(source, "rb") as original, replacing(path) as copy:
            shutil.copyfileobj(original, copy, 1 << 20)
    else:
        _publish(temporary, path)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _publish(temporary: Path, path: Path) -> None:
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)  # a rename is on the disk only when its folder is
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
