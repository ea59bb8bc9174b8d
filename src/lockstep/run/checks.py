"""Checks of single values. What is refused is named as it is typed, with what would be right."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.arithmetic.layout import Refusal

ROOT = Path(__file__).resolve().parents[3]  # the project: conf/, src/, outputs/

Check = Callable[[str, Any], Any]


def whole(least: int, *, most: int | None = None, optional: bool = False) -> Check:
    """A whole number of at least `least`, and at most `most`."""
    bound = f"of at least {least}" + (f" and at most {most}" if most is not None else "")

    def check(key: str, value: Any) -> int | None:
        if value is None and optional:
            return None
        number = isinstance(value, int) and not isinstance(value, bool)
        if not number or value < least or (most is not None and value > most):
            raise Refusal(f"{key}={show(value)}: must be a whole number {bound}")
        return value

    return check


def real(*, above: float | None = None, least: float | None = None, optional: bool = False) -> Check:
    """A finite number, greater than `above` or at least `least`."""
    bound = f"greater than {above:g}" if above is not None else f"of at least {least:g}"

    def check(key: str, value: Any) -> float | None:
        if value is None and optional:
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or (above is not None and value <= above) or (least is not None and value < least):
            raise Refusal(f"{key}={show(value)}: must be a number {bound}")
        return float(value)

    return check


def fraction(key: str, value: Any) -> float:
    """A number of at least 0 and below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise Refusal(f"{key}={show(value)}: must be at least 0 and below 1")
    return float(value)


def choice(*names: str) -> Check:
    """One of `names`."""

    def check(key: str, value: Any) -> str:
        if value not in names:
            raise Refusal(f"{key}={show(value)}: {unknown(str(value), names)}")
        return str(value)

    return check


def several(each: Check) -> Check:
    """A list of values, at least one, each of which passes `each`."""

    def check(key: str, value: Any) -> list[Any]:
        if not isinstance(value, list | tuple) or not value:
            raise Refusal(f"{key}={show(value)}: must be a list, '{key}=[<value>,...]'")
        return [each(key, one) for one in value]

    return check


def accumulation(key: str, value: Any) -> int | str | None:
    """A whole number of at least 1, `auto`, or null."""
    if value == "auto":
        return "auto"
    try:
        return whole(1, optional=True)(key, value)
    except Refusal as refusal:
        raise Refusal(f"{refusal}, or auto") from None


def flag(key: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise Refusal(f"{key}={show(value)}: must be true or false")
    return value


def flag_or(*names: str) -> Check:
    """True, false, or one of `names`."""

    def check(key: str, value: Any) -> bool | str:
        if not isinstance(value, bool) and value not in names:
            raise Refusal(f"{key}={show(value)}: must be true, false or {' or '.join(names)}")
        return value

    return check


def text(key: str, value: Any) -> str | None:
    """A text, or null."""
    if value is not None and not isinstance(value, str | int | float):
        raise Refusal(f"{key}={show(value)}: must be a text")
    return None if value is None else str(value)


def folder(key: str, value: Any) -> str:
    """A folder, absolute."""
    if not isinstance(value, str | int | float) or isinstance(value, bool) or not str(value):
        raise Refusal(f"{key}={show(value)}: must be a folder")
    return os.path.abspath(os.path.expanduser(str(value)))


def run_name(key: str, value: Any) -> str:
    """A folder name that stays inside the outputs folder."""
    if not isinstance(value, str | int | float) or not re.fullmatch(r"\w[\w.+ -]{0,99}", str(value)):
        raise Refusal(
            f"{key}={show(value)}: a name starts with a letter or digit, and has those, '.', '_', '+', '-' and spaces"
        )
    return str(value)


def node(key: str, value: Any) -> dict[str, Any]:
    """A config group."""
    if not isinstance(value, Mapping):
        raise Refusal(f"{key}={show(value)}: must be the name of a file in conf/{key}/ ({', '.join(options(key))})")
    return dict(value)


def optional_node(key: str, value: Any) -> dict[str, Any]:
    """A config group that may be left out."""
    return {} if value is None else node(key, value)


def show(value: Any) -> str:
    """A value as it is typed on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def options(group: str) -> list[str]:
    """The files of a config group."""
    return sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))


def unknown(name: str, known: Iterable[str]) -> str:
    """`did you mean X? known: ...`; of a long list only what is near."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3)
    nearest = f"did you mean {near[0]}?" if near else ""
    return f"{nearest} known: {', '.join(known)}".strip() if len(known) <= 12 else nearest or "--help lists them"
