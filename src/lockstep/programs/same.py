"""Tell two trainings apart, whoever wrote them: same bits, same up to rounding, or different, and why:

    lockstep same "python train.py" "torchrun --nproc-per-node=2 train.py"
    lockstep same "python train.py --bs 64" "python train.py --bs 32 --accumulate 2" --steps 20
    lockstep same before.trace after.trace
    lockstep same outputs/mnist_cnn_digits/<one> outputs/mnist_cnn_digits/<other>

The two programs are run as they stand, with a recorder in each of their Python processes (torch's public hooks; it
changes no bit), and are ended after `--steps` optimizer steps. If their bits differ, each is run a second time, and the
first one a third time with the last bit of each weight flipped: how far that takes it is what rounding does. Of two
folders, the steps after the last checkpoint that both have are taken again, and judged in the same way.
`lockstep trace` writes such a recording into a file. docs/use/same.md has a case from beginning to end.

Exit codes: 0 same bits, or the same up to rounding; 1 different; 2 bad input, as a program that fails or hangs.
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import UserError
from lockstep.files import write
from lockstep.launch.signals import ENDING, interrupt, signal_handler
from lockstep.programs.common.parser import parser_of

if TYPE_CHECKING:
    from lockstep.programs.sameness.running import Limits
    from lockstep.programs.sameness.verdict import Verdict


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program's arguments."""
    made = parser_of("same", __doc__)
    made.add_argument("first", help="a command line, a .trace file, or a folder of a run of Lockstep")
    made.add_argument("second", help="the same, for the other side")
    add_limits(made, "; of two folders 200")
    made.add_argument("--once", action="store_true", help="do not check whether a program repeats itself")
    made.add_argument("--report", type=Path, metavar="page.html", help="write a page with the evidence of each step")
    made.add_argument("--json", action="store_true", help="print the verdict and the evidence as JSON")
    return made


def add_limits(made: argparse.ArgumentParser, folders: str = "") -> None:
    """Add the arguments that say how much of a program is recorded."""
    made.add_argument("--steps", type=_positive(int), help=f"optimizer steps to record (20{folders})")
    made.add_argument("--timeout", type=_positive(float), help="seconds to the next step of a command (600)")


def limits(chosen: argparse.Namespace) -> "Limits":
    """Return how much of a program is recorded, as the arguments say."""
    from lockstep.programs.sameness.running import Limits

    return Limits(chosen.steps or Limits.steps, chosen.timeout or Limits.timeout)


def _positive(kind: type) -> "partial[float]":
    return partial(_parsed, kind)


def _parsed(kind: type, text: str) -> float:
    try:
        value: float = kind(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text}: a number above 0")
    return value


def main(words: list[str]) -> int:
    """Compare the two sides. Return the exit code.

    Raises:
        UserError: a side can't be read, fails, hangs, or takes no step.
    """
    chosen = parser().parse_args(words)
    with signal_handler(interrupt, *ENDING):  # so that the programs end, and what they wrote is removed
        return _compare(chosen)


def _compare(chosen: argparse.Namespace) -> int:
    places = [Path(chosen.first), Path(chosen.second)]
    if all(os.path.isdir(place) for place in places):  # Path.is_dir() fails on a long command
        if chosen.timeout is not None:
            raise UserError("--timeout is for commands: leave it out for two folders")
        from lockstep.programs.sameness.folders import MOST_STEPS, compare_folders  # torch takes seconds

        return _show(compare_folders(places[0], places[1], chosen.steps or MOST_STEPS, not chosen.once), chosen)
    if folder := next((place for place in places if os.path.isdir(place)), None):
        raise UserError(
            f"{folder}: a run's folder is compared with another one only: give two folders, or two commands"
        )
    from lockstep.programs.sameness.sides import compare

    announce = partial(print, file=sys.stderr)
    return _show(compare(chosen.first, chosen.second, limits(chosen), not chosen.once, announce), chosen)


def _show(verdict: "Verdict", chosen: argparse.Namespace) -> int:
    """Print a verdict, and write its page. Return the exit code."""
    if chosen.report:
        from lockstep.programs.sameness.page import page

        write(chosen.report, page(verdict, chosen.first, chosen.second).encode())
    print(json.dumps(verdict.as_json(), indent=2) if chosen.json else verdict.text)
    return verdict.code
