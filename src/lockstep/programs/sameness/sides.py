"""Get the runs of both sides, as far as the verdict needs them: of commands, of trace files, of whatever can be run."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from lockstep.errors import UserError
from lockstep.programs.sameness.judging import Pair
from lockstep.programs.sameness.recorded import Run, Side, read
from lockstep.programs.sameness.running import Limits, record
from lockstep.programs.sameness.verdict import Verdict, judge

FLIPPED = ("flipped", "flipped 2", "flipped 3")


class Program(Protocol):
    """A side: what can be run, or was recorded.

    Attributes:
        name: what its user calls it.
        is_recorded: whether its runs are there, and no other can be made.
    """

    name: str
    is_recorded: bool

    def run(self, kind: str) -> Run | None:
        """Return a run: `run`, `again`, or one of FLIPPED; None if there is none."""


@dataclass
class Command:
    """A command line, which is run."""

    name: str
    limits: Limits
    announce: Callable[[str], object]
    is_recorded = False

    def run(self, kind: str) -> Run:
        """Run the command; for what it raises see `record`."""
        why = ", with a bit of each weight flipped" if kind in FLIPPED else ""
        self.announce(f"running {self.name}{'' if kind == 'run' else ' again'}{why}")
        return record(self.name, self.limits, (kind,)).run(kind)


class TraceFile:
    """A trace file, which is read."""

    is_recorded = True

    def __init__(self, name: str, announce: Callable[[str], object]) -> None:
        announce(f"reading {name}")
        self.name, self.written = name, read(Path(name))

    def run(self, kind: str) -> Run | None:
        """Return a run of the file."""
        return self.written.run(kind, self.name) if kind in self.written.runs else None


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
    one, other = (
        TraceFile(text, announce) if _is_trace(text) else Command(text, limits, announce) for text in (first, second)
    )
    return compared(one, other, twice)[0]


def compared(one: Program, other: Program, twice: bool = True, start: int = 0) -> tuple[Verdict, Pair]:
    """Return the verdict on two sides, and their runs. They are run once more, and with flipped bits, if bits differ.

    Args:
        one, other: the sides.
        twice: whether each is run a second time.
        start: the step before the first one that is recorded.
    """
    programs = one, other
    pair = Pair(Side(one.name, _run(one)), Side(other.name, _run(other)), start)
    if pair.same_bits:
        return judge(pair), pair
    sides = [pair.one, pair.other]
    for number, each in enumerate(programs):
        if each.is_recorded or not any(side.flipped for side in sides):
            flipped = tuple(run for kind in FLIPPED[: 3 if each.is_recorded else 1] if (run := each.run(kind)))
            sides[number] = replace(sides[number], flipped=flipped)
    for number, each in enumerate(programs):
        if twice:
            sides[number] = replace(sides[number], again=each.run("again"))
    if not any(side.flipped for side in sides):
        raise UserError(
            f"{one.name}: it has no run that measures rounding: record it with lockstep trace, without --once"
        )
    witnesses = _witnesses(programs)

    def witness() -> bool:
        number, run = next(witnesses, (0, None))
        if run is not None:
            sides[number] = replace(sides[number], flipped=(*sides[number].flipped, run))
            pair.one, pair.other = sides
        return run is not None

    pair.one, pair.other = sides
    pair.forget()
    return judge(pair, witness), pair


def _run(program: Program) -> Run:
    run = program.run("run")
    assert run is not None
    return run


def _witnesses(programs: tuple[Program, Program]) -> Iterator[tuple[int, Run | None]]:
    for number, each in enumerate(programs):
        if not each.is_recorded:
            yield from ((number, each.run(kind)) for kind in FLIPPED[1:])


def _is_trace(text: str) -> bool:
    return " " not in text.strip() and os.path.isfile(text) and not text.endswith((".py", ".sh"))
