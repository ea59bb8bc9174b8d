"""What this machine has, and what is wrong with it:

    python scripts/doctor.py

Devices and how they are linked, cores, memory, versions, a free port, and the all-reduce of two workers, measured: over
gloo always, over NCCL where there are two GPUs. Each problem is one line, with its cure. Exit codes: 0 all well, 1 not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from checkup import machine
from checkup.link import all_reduce
from checkup.machine import Found, Problem

CHECKS: dict[str, Callable[[], Found]] = {
    "software": machine.software,
    "cores": machine.cores,
    "memory": machine.memory,
    "GPUs": machine.gpus,
    "network": machine.network,
    "all-reduce": all_reduce,
}


def main() -> int:
    """Prints the findings; the number of problems decides about the exit code."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    problems: list[Problem] = []
    for title, look in CHECKS.items():
        try:
            facts, found = look()
        except Exception as error:  # a check that fails is itself a finding, and the others still run
            facts, found = [], [(f"{title} can't be looked at: {type(error).__name__}: {error}".splitlines()[0], "")]
        for number, fact in enumerate(facts):
            print(f"{title if not number else '':<12} {fact}", flush=True)
        problems += found
    print()
    for wrong, cure in problems:
        print(f"wrong: {wrong}" + (f"; {cure}" if cure else ""))
    print(f"{len(problems)} problem{'s' * (len(problems) != 1)}" if problems else "all well")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
