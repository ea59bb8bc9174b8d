"""Draw small changes of arithmetic, step and checkpoint by a seed, test each, and write docs/results/mutants.md.

    python scripts/lab/mutants.py
    python scripts/lab/mutants.py --number 50 --seed 7 --rooms step

mutmut writes the changed code (mutants) into mutants/, and runs for each the unit tests and those of ranks that call
the changed function. Functions with a decorator are not changed. The page has the figures and what survived.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from nightly import ROOT, commit_of

PAGE = ROOT / "docs" / "results" / "mutants.md"
FOLDER = ROOT / "mutants"
ROOMS = ("arithmetic", "step", "checkpoint")
FIRST = "lockstep.arithmetic.order.*mutmut_1"  # tried first: mutmut writes all mutants and finds the tests of each
OUTCOMES = {0: "survived", 1: "killed", 3: "killed", 5: "no test", 33: "no test"}  # mutmut's, and else: out of time
COLUMNS = ("killed", "out of time", "survived", "no test")
EQUIVALENT: dict[str, str] = {}  # a change as `change` returns it, and why no test can tell


def mutmut(*arguments: str, quiet: bool = False) -> str:
    """Run mutmut in the checkout, and return what it prints if it is quiet."""
    command = ["nice", str(Path(sys.executable).parent / "mutmut"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, check=True, text=True, env=environment, stdout=subprocess.PIPE if quiet else None
    ).stdout


def results(room: str) -> dict[str, int | None]:
    """Return the mutants of a room with the exit codes of their tests, None where they were not run."""
    files = sorted((FOLDER / "src" / "lockstep" / room).glob("*.meta"))
    return {name: code for file in files for name, code in json.loads(file.read_text())["exit_code_by_key"].items()}


def outcome(code: int | None) -> str:
    """Return the column of the page for an exit code."""
    return "no test" if code is None else OUTCOMES.get(code, "out of time")


def function_of(name: str) -> str:
    """Return the name that mutmut gives a function in its statistics."""
    return name.rpartition("__mutmut_")[0]


def plain(name: str) -> str:
    """Return a function's name as Python has it: lockstep.step.loop.StepLoop.advance."""
    module, _, function = function_of(name).rpartition(".")
    return f"{module}.{function.removeprefix('x_').removeprefix('xǁ').replace('ǁ', '.')}"


def change(diff: str) -> str:
    """Return the lines that a mutant changes: `old` becomes `new`."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "#"))]
    old, new = (" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    return f"`{old}` becomes `{new}`"


def page(outcomes: Mapping[str, Mapping[str, str]], survivors: Mapping[str, str], seed: int, commit: str) -> str:
    """Return the page about one run: per room the outcome of each mutant, and the changes that survived."""
    rows = []
    for room, found in outcomes.items():
        count = Counter(found.values())
        share = 100 * (count["killed"] + count["out of time"]) / max(len(found), 1)
        counts = " | ".join(str(count[column]) for column in COLUMNS)
        rows.append(f"| {room} | {len(found)} | {counts} | {share:.0f}% |")
    untested = sorted({plain(name) for found in outcomes.values() for name, how in found.items() if how == "no test"})
    lines = [
        "# Changes of the code that the tests notice",
        "",
        "`make mutants` draws small changes of three rooms (a `+` for a `-`, a call without an argument), and runs for",
        "each the tests of `make quick` that lie in this room and call the changed function. It wrote this page. A",
        "change that survives is a missing test, dead code, or the same program written otherwise.",
        "",
        f"Commit {commit}, {datetime.now(UTC):%Y-%m-%d}, seed {seed}.",
        "",
        f"| room | drawn | {' | '.join(COLUMNS)} | noticed |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    if survivors:
        lines += ["", "Survived:", ""]
        for name, text in sorted(survivors.items()):
            lines.append(f"- `{plain(name)}`: {text}" + (f". {EQUIVALENT[text]}" if text in EQUIVALENT else ""))
    if untested:
        lines += ["", "Not called by such a test:", "", *(f"- `{name}`" for name in untested)]
    return "\n".join([*lines, ""])


def draw(names: Sequence[str], number: int, seed: int) -> list[str]:
    """Return some of the names, the same for the same names, number and seed."""
    return random.Random(seed).sample(sorted(names), min(number, len(names)))


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=100, help="mutants of each room, %(default)s if not given")
    parser.add_argument("--seed", type=int, default=45, help="%(default)s if not given")
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=[*ROOMS])
    parser.add_argument("--processes", type=int, default=2, help="%(default)s if not given")
    options = parser.parse_args()
    commit, run = commit_of(ROOT), ("run", "--max-children", str(options.processes))
    mutmut(*run, FIRST)
    drawn = {room: draw([*results(room)], options.number, options.seed) for room in options.rooms}
    tests = json.loads((FOLDER / "mutmut-stats.json").read_text())["tests_by_mangled_function_name"]
    mutmut(*run, *(name for names in drawn.values() for name in names if tests.get(function_of(name))))
    codes = {room: results(room) for room in drawn}
    outcomes = {room: {name: outcome(codes[room][name]) for name in names} for room, names in drawn.items()}
    survivors = [name for found in outcomes.values() for name, how in found.items() if how == "survived"]
    changes = {name: change(mutmut("show", name, quiet=True)) for name in survivors}
    PAGE.write_text(page(outcomes, changes, options.seed, commit))
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
