"""Text for messages: plurals, lists of names, paths, durations. Standard library only."""

import os
import re
import shlex
import signal
from collections.abc import Iterable
from pathlib import Path


def plural(count: int, thing: str) -> str:
    """Return a count with its noun: `1 device`, `2 devices`."""
    return f"{count} {thing}{'s' * (count != 1)}"


def join_names(names: Iterable[object], most: int = 3) -> str:
    """Return names separated by commas; of more than `most` the first ones: `a, b, c and 2 more`."""
    words = [str(name) for name in names]
    return ", ".join(words[:most]) + f" and {len(words) - most:,} more" * (len(words) > most)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, at most 100 characters."""
    return (str(error).strip().splitlines() or [""])[0][:100]


def short_path(path: str | Path) -> str:
    """Return a path relative to the current directory if it is below it, else the absolute path."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith("..") else relative


def shell_override(key: str, path: str | Path) -> str:
    """Return the command-line override `key=path`, quoted for a shell in the current directory."""
    return shlex.quote(f"{key}={short_path(path)}")


def signal_name(number: int) -> str:
    """Return a signal's name: `SIGKILL`; `signal 40` for a real-time signal, which has no name in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def duration(seconds: float) -> str:
    """Return a duration in the unit that fits: `45 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def is_url(place: str) -> bool:
    """Check whether a place is a URL, `s3://bucket/images` for example, and not the path of a folder."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+(::|:/)", place) is not None
