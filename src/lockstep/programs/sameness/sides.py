"""Get the runs of both sides, as far as the verdict needs them: of commands, of trace files, of whatever can be run."""

import os
from collections.abc import Callable
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
    """

    name: str

    def run(self, kind: str) -> Run | None:
        """Return a run: `run`, `again`, or one of FLIPPED; None if a trace file has none."""


@dataclass
class Command:
    """A command line, which is run."""

    name: str
    limits: Limits
    announce: Callable[[str], object]

    def run(self, kind: str) -> Run:
        """Run the command; for what it raises see `record`."""
        why = ", with a bit of each weight flipped" if kind in FLIPPED else ""
        self.announce(f"running {self.name}{'' if kind == 'run' else ' again'}{why}")
        return record(self.name, self.limits, (kind,)).run(kind)


class TraceFile:
    """A trace file, which is read."""

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
    pair = Pair(Side(one.name, _run(one)), Side(other.name, _run(other)), start)
    if pair.same_bits:
        return judge(pair), pair
    if twice:
        pair.one, pair.other = (
            replace(side, again=each.run("again")) for side, each in ((pair.one, one), (pair.other, other))
        )
    measures = ((each, run) for each in (one, other) for kind in FLIPPED if (run := each.run(kind)))

    def measure() -> bool:
        """Add a run that measures rounding. Return whether there is one."""
        each, run = next(measures, (one, None))
        if run is not None:
            if each is one:
                pair.one = replace(pair.one, flipped=(*pair.one.flipped, run))
            else:
                pair.other = replace(pair.other, flipped=(*pair.other.flipped, run))
            pair.forget()
        return run is not None

    if not measure():
        raise UserError(
            f"{one.name}: it has no run that measures rounding: record it with lockstep trace, without --once"
        )
    return judge(pair, measure), pair


def _run(program: Program) -> Run:
    run = program.run("run")
    assert run is not None
    return run


def _is_trace(text: str) -> bool:
    return " " not in text.strip() and os.path.isfile(text) and not text.endswith((".py", ".sh"))
