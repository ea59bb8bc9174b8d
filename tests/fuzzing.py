"""What tests of generated inputs share: how many are tried, and what counts as a refusal."""

import struct
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from lockstep.commands import cli
from lockstep.errors import UserError

NIGHTLY = settings.get_current_profile_name() == "nightly"
# what is done, where and from where as parts of the length, and the bytes of it
Edit = tuple[str, float, float, bytes]
# What a header may say of a size or a place, in both orders of bytes.
NUMBERS = [struct.pack(f"{order}I", each) for order in "<>" for each in (0, 1, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1)]
SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)


def often(examples: int) -> settings:
    """Return settings with so many examples, each day the same; at night fifty times as many others."""
    count = examples * 50 if NIGHTLY else examples
    return settings(max_examples=count, deadline=None, derandomize=not NIGHTLY, suppress_health_check=SLOW_IS_FINE)


def result_or_line(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return two things: what a call returns, and the line that refuses it; one of them is empty.

    Other exceptions go through: a user would see a traceback.
    """
    try:
        return call(), ""
    except UserError as refusal:
        line = cli.error_line(refusal)
        assert len(line) > 10, line
        assert line.isprintable(), line
        assert ":" in line, line
        return None, line


def refused_line(call: Callable[[], Any]) -> str:
    """Return the line that refuses a call."""
    result, line = result_or_line(call)
    assert line, f"not refused: {result}"
    return line


def edits(most: int, longest: int) -> st.SearchStrategy[list[Edit]]:
    """Generate at most so many edits of a file, each of at most so many bytes."""
    edit = st.tuples(
        st.sampled_from(["cut", "change", "remove", "insert", "copy"]),
        st.floats(0, 1),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=longest) | st.sampled_from(NUMBERS),
    )
    return st.lists(edit, min_size=1, max_size=most)


def damaged(content: bytes, edits: list[Edit]) -> bytes:
    """Return a file with edits."""
    actual = bytearray(content)
    for what, where, elsewhere, text in edits:
        at, other = int(where * len(actual)), int(elsewhere * len(actual))
        match what:
            case "cut":
                del actual[at:]
            case "change":
                actual[at : at + len(text)] = text
            case "remove":
                del actual[at : at + len(text)]
            case "insert":
                actual[at:at] = text
            case "copy":
                actual[at : at + len(text)] = actual[other : other + len(text)]
    return bytes(actual)
