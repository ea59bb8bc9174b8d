"""Draw small changes of arithmetic, step and checkpoint by a seed, test each, and write docs/results/mutants.md.

    python scripts/lab/mutation.py
    python scripts/lab/mutation.py --number 50 --seed 7 --rooms step
    python scripts/lab/mutation.py --again

mutmut writes the changed functions (mutants) into mutants/. For each, a fork of this process runs those tests of
`make quick` that call the function. Functions with a decorator are not changed. The page has the figures
and what survived. `--again` tries only what survived the last time, which may have been interrupted, with the tests of
today: the other outcomes stay.
"""

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

import pytest
from mutmut.__main__ import copy_also_copy_files, copy_src_dir, create_mutants
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state
from mutmut.utils.file_utils import setup_source_paths
from nightly import ROOT, commit_of

PAGE = ROOT / "docs" / "results" / "mutants.md"
FOLDER = ROOT / "mutants"
ROOMS = ("arithmetic", "step", "lightning", "checkpoint")
OUTCOMES = {0: "survived", 1: "killed", 2: "killed", 3: "killed", 4: "killed"}  # pytest's codes; else: out of time
SLOWED = "tests/step/test_loop.py::test_a_step_calls_fewer_functions_than_lightnings_loop"  # counts calls, mutmut's too
QUICK = "(unit or ranks) and not nightly"
ARGUMENTS = ["--rootdir=.", "-q", "-n", "0", "-p", "no:randomly", "-m", QUICK, f"--deselect={SLOWED}"]
# Documents and examples are not in mutants/, and quick has neither engines nor lab.
TESTS = ("tests", *(f"--ignore=tests/{name}" for name in ("docs", "engines", "examples", "lab", "test_repo.py")))
SECONDS, TIMES = 30, 5  # a mutant's tests may take so many seconds, and so many times what they take without it
SURVIVED = ("survived", "no test")
COLUMNS = ("killed", "out of time", "survived", "no test", "same program")
STRICT = re.compile(r",? *(strict=\w+)?(?=\))")  # of `zip`, which then checks that its lists have one length
GPU = "Without a GPU, the same program: all tensors are on one device"
EQUIVALENT = {  # a part of a line, what it becomes, and why no test can tell
    (".min(initial=0)", ".min(initial=1)"): "The same program: the largest value starts at 0",
    ('torch.device("cuda", index)', "torch.device(index)"): "The same program: to torch, a number alone is a GPU's",
    ("on_batch_start(batch, dataloader_idx)", "on_batch_start(batch, None)"): (
        "The same program: an evaluation has one loader, for which Lightning gives None"
    ),
    **{
        ("neutral, batch_size=0, ", f"neutral, {size}"): (
            "The same result: the value of all ranks replaces it at once, whatever it weighs"
        )
        for size in ("", "batch_size=1, ", "batch_size=None, ")
    },
    ('.to("cpu", non_blocking=True)', ".to(non_blocking=True)"): GPU,
    ("value.to(self.device)", "value.to(None)"): GPU,
    ("norm.to(device)", "norm.to(None)"): GPU,
    ('.to("cpu", non_blocking=True)', '.to("cpu", non_blocking=False)'): GPU,
    ("max(1, len(result))", "max(2, len(result))"): "The same program: chunks of one element are taken two at a time",
}


def write_mutants() -> None:
    """Write the changed code into mutants/, or only that of files that were edited since the last time."""
    set_mutant_under_test("mutant_generation")
    FOLDER.mkdir(exist_ok=True)
    copy_src_dir()
    copy_also_copy_files()
    create_mutants(os.cpu_count() or 1)
    setup_source_paths()


def names(room: str) -> list[str]:
    """Return the names of a room's mutants."""
    files = sorted((FOLDER / "src" / "lockstep" / room).glob("*.meta"))
    return [name for file in files for name in json.loads(file.read_text())["exit_code_by_key"]]


def forked(work: Callable[[], int], seconds: float) -> int:
    """Return the exit code of some work in a fork of this process, or -9 if it takes longer."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.chdir(FOLDER)
            with Path(os.devnull).open("w") as nothing:
                os.dup2(nothing.fileno(), 1)
                os.dup2(nothing.fileno(), 2)
                code = work()
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Calls:
    """A plug-in of pytest that notes the tests of each function, and how long each test takes."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, float]] = {}
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the functions that a test called: mutmut puts their names into a set."""
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call":
            for function in state()._stats:
                self.tests.setdefault(function, {})[report.nodeid] = report.duration
        if report.when == "teardown":
            state()._stats.clear()


def tests_of_functions(rooms: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the tests that call each function, and their seconds, the fastest first; those of the rooms must pass."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tests.json"

        def work() -> int:
            set_mutant_under_test("stats")
            calls = Calls()
            code = int(pytest.main([*ARGUMENTS, *TESTS], plugins=[calls]))
            file.write_text(json.dumps(calls.tests))
            return code if code > 1 else any(test.split("/")[1] in rooms for test in calls.failed)

        if code := forked(work, math.inf):
            if code > 1:
                raise SystemExit(f"pytest can't run in mutants/, which lacks a file perhaps: its exit code is {code}")
            raise SystemExit(f"the tests of {', '.join(rooms)} must pass in mutants/ before anything is changed")
        seconds_of: dict[str, dict[str, float]] = json.loads(file.read_text())
    return {name: dict(sorted(tests.items(), key=lambda test: test[1])) for name, tests in seconds_of.items()}


def tried(name: str, tests: Mapping[str, float]) -> str:
    """Return how a mutant fares with the tests of its function."""

    def work() -> int:
        set_mutant_under_test(name)
        return int(pytest.main([*ARGUMENTS, "-x", *tests]))

    seconds = SECONDS + TIMES * sum(tests.values())
    return OUTCOMES.get(forked(work, seconds), "out of time") if tests else "no test"


def try_room(room: str, drawn: Sequence[str], tests: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Return how each of some mutants of a room fares; a line at the end of mutants/ROOM.txt says so at once."""
    outcomes = {}
    with (FOLDER / f"{room}.txt").open("a", buffering=1) as lines:
        for name in drawn:
            outcomes[name] = tried(name, tests.get(function_of(name), {}))
            lines.write(f"{outcomes[name]}: {name}\n")
    return outcomes


def last_outcomes(room: str) -> dict[str, str]:
    """Return how the mutants of a room fared the last time, as far as they were tried."""
    file = FOLDER / f"{room}.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return {name: outcome for outcome, _, name in (line.partition(": ") for line in lines)}


def function_of(name: str) -> str:
    """Return the name that mutmut gives a function in its statistics."""
    return name.rpartition("__mutmut_")[0]


def plain(name: str) -> str:
    """Return a function's name as Python has it: lockstep.lightning.steps.StepLoop.advance."""
    module, _, function = function_of(name).rpartition(".")
    return f"{module}.{function.removeprefix('x_').removeprefix('xǁ').replace('ǁ', '.')}"


def change(diff: str) -> str:
    """Return the lines that a mutant changes: `old` becomes `new`."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "#"))]
    old, new = (" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    return f"`{old}` becomes `{new}`"


def why_equivalent(text: str) -> str:
    """Return why no test can tell a change, as `change` returns it, from the original; empty if one could."""
    old, _, new = text.strip("`").partition("` becomes `")
    if "strict=True" in old and STRICT.sub("", old) == STRICT.sub("", new):
        return "The same program: the lists always have one length"
    return next(
        (why for (part, other), why in EQUIVALENT.items() if part in old and old.replace(part, other) == new), ""
    )


def page(outcomes: Mapping[str, Mapping[str, str]], survivors: Mapping[str, str], seed: int, commit: str) -> str:
    """Return the page about one run: per room the outcome of each mutant, and the changes that survived."""
    rows = []
    same = [name for name, text in survivors.items() if why_equivalent(text)]
    for room, of_room in outcomes.items():
        count = Counter("same program" if name in same else how for name, how in of_room.items())
        share = 100 * (count["killed"] + count["out of time"]) / max(len(of_room) - count["same program"], 1)
        counts = " | ".join(str(count[column]) for column in COLUMNS)
        rows.append(f"| {room} | {len(of_room)} | {counts} | {share:.0f}% |")
    untested = {plain(name) for of_room in outcomes.values() for name, how in of_room.items() if how == "no test"}
    lines = [
        "# Changes of the code that the tests notice",
        "",
        "`make mutants` draws small changes of some rooms (a `+` for a `-`, a call without an argument), and runs for",
        "each the tests of `make quick` that call the changed function. It wrote this page. A change that survives",
        "is a missing test, dead code, or the same program written otherwise. The last ones have their reason below,",
        "and do not count among those that could be noticed.",
        "",
        f"Commit {commit}, {datetime.now(UTC):%Y-%m-%d}, seed {seed}.",
        "",
        f"| room | drawn | {' | '.join(COLUMNS)} | noticed |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]
    if survivors:
        lines += ["", "Survived:", "", "```text"]
        for name, text in sorted(survivors.items()):
            lines.append(f"- `{plain(name)}`: {text}" + f". {why_equivalent(text)}" * bool(why_equivalent(text)))
        lines.append("```")
    if untested:
        lines += ["", "Not called by such a test:", "", *(f"- `{name}`" for name in sorted(untested))]
    return "\n".join([*lines, ""])


def shown(name: str) -> str:
    """Return the difference that a mutant makes."""
    mutmut = Path(sys.executable).parent / "mutmut"
    return subprocess.run([mutmut, "show", name], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def draw(mutants: Sequence[str], number: int, seed: int) -> list[str]:
    """Return some of the names, the same for the same names, number and seed."""
    return random.Random(seed).sample(sorted(mutants), min(number, len(mutants)))


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=100, help="mutants of each room, %(default)s if not given")
    parser.add_argument("--seed", type=int, default=45, help="%(default)s if not given")
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=[*ROOMS])
    parser.add_argument("--again", action="store_true", help="try only what survived the last time")
    options = parser.parse_args()
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    commit = commit_of(ROOT)
    write_mutants()
    last: dict[str, dict[str, str]] = {room: {} for room in options.rooms}
    rooms = [(room, draw(names(room), options.number, options.seed)) for room in options.rooms]
    if options.again:
        last = {room: last_outcomes(room) for room in options.rooms}
        rooms = [(room, [name for name, how in last[room].items() if how in SURVIVED]) for room in options.rooms]
    for room in () if options.again else options.rooms:
        (FOLDER / f"{room}.txt").unlink(missing_ok=True)
    os.nice(10)
    os.chdir(FOLDER)
    with Path(os.devnull).open("w") as nothing, redirect_stdout(nothing):
        pytest.main([*ARGUMENTS, "--collect-only", *TESTS])  # the forks need not import torch
    tests = tests_of_functions(options.rooms)
    with get_context("fork").Pool(2) as pool:
        tried_now = pool.starmap(try_room, [(room, drawn, tests) for room, drawn in rooms], chunksize=1)
    outcomes = {room: last[room] | now for room, now in zip(options.rooms, tried_now, strict=True)}
    survivors = [name for of_room in outcomes.values() for name, how in of_room.items() if how == "survived"]
    changes = {name: change(shown(name)) for name in survivors}
    PAGE.write_text(page(outcomes, changes, options.seed, commit))
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
