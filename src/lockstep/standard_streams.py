"""Make a program's standard streams safe: closed ones lead nowhere, and what can't be written is dropped.

A run must not fail because nobody reads its lines: they are in its log too. Standard library only, since a program
calls `protect` before its other imports.
"""

import io
import os
import select
import sys
from contextlib import suppress
from typing import Any


class DroppingFile(io.FileIO):
    """A file descriptor to write to. It drops what can't be written: the reader has exited, or the terminal is gone."""

    warned = False

    def write(self, data: Any, /) -> int:
        """Write all of `data`, and wait where a descriptor that does not block is full."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                written = super().write(rest)
                if written is None:
                    select.select([], [self], [])
                rest = rest[written or 0 :]
        except OSError as error:
            self._warn(error)
        return size

    def _warn(self, error: OSError) -> None:
        """Print once that standard output is incomplete. A reader that has exited wanted no more of it."""
        if self.fileno() == 1 and not self.warned and not isinstance(error, ConnectionError):
            self.warned = True
            with suppress(OSError):
                os.write(2, f"standard output: {error.strerror}: what is printed there is lost\n".encode())


def protect() -> None:
    """Open closed standard streams on the null device, and let standard output and standard error drop lines.

    Streams that somebody has replaced stay as they are. A second call changes nothing.
    """
    closed = set()
    for descriptor in (0, 1, 2):  # in this order: a new descriptor is the lowest free one
        try:
            os.fstat(descriptor)
        except OSError:
            # Otherwise the next file, a checkpoint perhaps, would get this number and all that is printed.
            os.open(os.devnull, os.O_RDWR)
            closed.add(descriptor)

    def usable(descriptor: int) -> int:
        """Return the number of a stream that Python has found closed. Another file may have it by now."""
        return descriptor if descriptor in closed else os.open(os.devnull, os.O_RDWR)

    if sys.stdin is None:
        sys.stdin = sys.__stdin__ = open(usable(0), closefd=False)  # type: ignore[misc]  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = sys.__stdout__ = _dropping(usable(1))  # type: ignore[misc]
    elif sys.stdout is sys.__stdout__ and _is_file(sys.stdout, 1):
        sys.stdout = sys.__stdout__ = _dropping(1, sys.stdout)  # type: ignore[misc]
    if sys.stderr is None:
        sys.stderr = sys.__stderr__ = _dropping(usable(2))  # type: ignore[misc]
    elif sys.stderr is sys.__stderr__ and _is_file(sys.stderr, 2):
        sys.stderr = sys.__stderr__ = _dropping(2, sys.stderr)  # type: ignore[misc]


def _is_file(stream: Any, descriptor: int) -> bool:
    """Check whether a stream is as Python has made it for a descriptor: neither replaced nor protected."""
    buffer = getattr(stream, "buffer", None)  # with `python -u` the file itself
    raw = getattr(buffer, "raw", buffer)
    return type(raw) is io.FileIO and raw.fileno() == descriptor


def _dropping(descriptor: int, stream: Any = None) -> io.TextIOWrapper:
    """Return a stream to a descriptor that drops lines, with the encoding and the buffering of `stream`."""
    if stream is not None:
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(DroppingFile(descriptor, "w", closefd=False)),
        encoding=stream and stream.encoding,
        errors=stream and stream.errors,
        line_buffering=stream is None or stream.line_buffering,
        write_through=stream is not None and stream.write_through,
    )
