"""Words for people: plurals, lists of names, durations. Standard library only."""

import os
import shlex
from collections.abc import Iterable
from pathlib import Path


def plural(count: int, thing: str) -> str:
    """`1 device`, `2 devices`."""
    return f"{count} {thing}{'s' * (count != 1)}"


def join_names(names: Iterable[object], most: int = 3) -> str:
    """`a, b, c`, of more than `most` the first ones: `a, b, c, ...`."""
    words = [str(name) for name in names]
    return ", ".join(words[:most]) + ", ..." * (len(words) > most)


def short_path(path: str | Path) -> str:
    """Return a path as it can be pasted here: below the current directory relative to it, elsewhere absolute."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith("..") else relative


def shell_override(key: str, path: str | Path) -> str:
    """Return an override of the command line that names a path, as it can be pasted into a shell here."""
    return shlex.quote(f"{key}={short_path(path)}")


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
