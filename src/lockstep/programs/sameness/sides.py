"""Get the runs of both sides, from command lines and trace files, as far as the verdict needs them."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.errors import UserError
from lockstep.programs.sameness.judging import Pair
from lockstep.programs.sameness.recorded import Written, read
from lockstep.programs.sameness.running import Limits, more, record
from lockstep.programs.sameness.verdict import Verdict, judge

FLIPPED = ("flipped", "flipped 2", "flipped 3")


def compare(
    first: str, second: str, limits: Limits, twice: bool = True, announce: Callable[[str], object] = lambda line: None
) -> Verdict:
    """Compare two programs, run now or recorded earlier.

    Args:
        first, second: command lines, or paths of trace files.
        limits: how much of a command is recorded.
        twice: whether each command is run a second time if the bits differ.
        announce: gets a line before each run.

    Raises:
        UserError: see `record` and `read`.
    """
    texts = first, second
    traces = [_is_trace(text) for text in texts]
    written: list[Written] = []
    for text, trace in zip(texts, traces, strict=True):
        announce(f"{'reading' if trace else 'running'} {text}")
        written.append(read(Path(text)) if trace else record(text, limits))
    pair = Pair(*(each.side(text) for each, text in zip(written, texts, strict=True)))
    if pair.same_bits:
        return judge(pair)

    def run_again(number: int, name: str) -> None:
        announce(f"running {texts[number]} again{_why(name)}")
        more(written[number], limits, name)

    if not traces[0] and "flipped" not in written[0].runs:
        run_again(0, "flipped")
    elif traces[0] and not traces[1] and "flipped" not in written[0].runs:
        run_again(1, "flipped")
    for number in (0, 1):
        if twice and not traces[number]:
            run_again(number, "again")
    if not any(name.startswith("flipped") for each in written for name in each.runs):
        raise UserError(f"{first}: it has no run that measures rounding: record it with lockstep trace, without --once")
    witnesses = _witnesses(traces)

    def witness() -> bool:
        number, name = next(witnesses, (0, ""))
        if name:
            run_again(number, name)
            sides = [each.side(text) for each, text in zip(written, texts, strict=True)]
            pair.one, pair.other = sides
        return bool(name)

    pair.one, pair.other = (each.side(text) for each, text in zip(written, texts, strict=True))
    return judge(pair, witness)


def _witnesses(traces: list[bool]) -> Iterator[tuple[int, str]]:
    for number, trace in enumerate(traces):
        if not trace:
            yield from ((number, name) for name in FLIPPED[1:])


def _why(name: str) -> str:
    return ", with a bit of each weight flipped" if name.startswith("flipped") else ""


def _is_trace(text: str) -> bool:
    return " " not in text.strip() and os.path.isfile(text) and not text.endswith((".py", ".sh"))
