"""Record what a training does, for `lockstep same`, now or later:

    lockstep trace -o before.trace -- python train.py
    lockstep trace -o after.trace -- torchrun --nproc-per-node=2 train.py
    lockstep same before.trace after.trace

The program is run as it stands and ended after `--steps` optimizer steps. Then it is run again with the last bit of
each weight flipped, and the trace holds both: how far that takes it is what rounding does. A trace is plain data.

Exit codes: 0 recorded, 2 bad input, as a program that fails, hangs, or takes no step.
"""

import argparse
import shlex
from pathlib import Path

from lockstep.errors import UserError
from lockstep.launch.signals import ENDING, interrupt, signal_handler
from lockstep.programs.common.parser import parser_of
from lockstep.programs.same import add_limits, limits
from lockstep.text import plural


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program's arguments."""
    made = parser_of("trace", __doc__)
    made.add_argument("-o", "--output", type=Path, required=True, metavar="x.trace", help="the file to write")
    made.add_argument("--once", action="store_true", help="run it once: without what measures rounding")
    add_limits(made)
    made.add_argument("command", nargs=argparse.REMAINDER, metavar="-- command ...", help="the program")
    return made


def main(words: list[str]) -> int:
    """Record a program. Return the exit code.

    Raises:
        UserError: there is no command, or it fails, hangs, or takes no step.
    """
    chosen = parser().parse_args(words)
    command = chosen.command[1:] if chosen.command[:1] == ["--"] else chosen.command
    if not command:
        raise UserError(f"lockstep trace: no command: lockstep trace -o {chosen.output} -- python train.py")
    from lockstep.programs.sameness.running import record

    text = command[0] if len(command) == 1 else shlex.join(command)
    with signal_handler(interrupt, *ENDING):
        written = record(text, limits(chosen), ("run",) if chosen.once else ("run", "flipped"))
    run = written.run("run")
    written.save(chosen.output)
    size = chosen.output.stat().st_size / 1e6
    what = f"{plural(run.length, 'step')} of {plural(len(run.ranks), 'rank')}"
    print(f"{chosen.output}: {what}, {size:.1f} MB")
    return 0
