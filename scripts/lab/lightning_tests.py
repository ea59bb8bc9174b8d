"""Run Lightning's own tests with `lockstep.Trainer` in the place of Lightning's Trainer, and count the results by kind.

    python scripts/lab/lightning_tests.py --lightning <checkout>      # writes docs/results/lightning-tests.md

The checkout is one of Lightning's repository at the tag nearest to the installed version; its tests aren't in the
wheel. pytest-timeout, psutil and jsonargparse must be installed. The class is exchanged (exchanged_trainer.py), nothing
else. What fails without a refusal is run again with Lightning's own Trainer: what fails then, too, says nothing about
Lockstep.

The suites run one after another, each test with a limit of time. The results are added to a file, so a command that was
ended goes on with the suites that it lacks. `--suites` runs some of them, and `--again` runs again what showed a bug.

lightning_tests.yaml has each refusal, and each other behaviour, with its reason. What it does not name is a bug.

Exit codes: 0 no bug, 1 bugs, which are printed, 2 bad input.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "src"))

import yaml
from nightly import commit_of
from repository import ROOT

from lockstep.programs.common.showing import markdown

PAGE = ROOT / "docs" / "results" / "lightning-tests.md"
HERE = Path(__file__).resolve().parent
SUITES = (
    *("trainer/connectors", "trainer/flags", "trainer/logging_", "trainer/optimization", "trainer/properties"),
    *("trainer/test_trainer.py", "trainer/test_dataloaders.py", "trainer/test_states.py"),
    *("trainer/test_config_validator.py", "callbacks", "checkpointing", "core", "loggers", "loops", "models"),
    *("overrides", "plugins", "profilers", "strategies", "tuner", "utilities", "accelerators", "test_cli.py"),
)
PASSED, SKIPPED, TOO = "passed", "can't run here", "fails with Lightning's Trainer, too"
REFUSED, BAD_INPUT, UNKNOWN = "refused on purpose", "bad input, refused by both", "unknown argument"
MEANT, BUG = "another behaviour, meant", "bug"
KINDS = {
    PASSED: "",
    REFUSED: "a `UserError` in one line; the reasons are below",
    BAD_INPUT: "the test expects an error; Lockstep's has another class or text",
    UNKNOWN: "an option of the Trainer that there is not",
    MEANT: "the reasons are below",
    BUG: "what no reason explains",
    TOO: "on this machine, with these versions",
    SKIPPED: "the test needs a GPU, TPU, several machines or a package, and skips itself or is refused for that",
}
TITLE = """# Lightning's own tests

    # scripts/lab/lightning_tests.py --lightning checkout-of-lightning

wrote this page: Lightning's tests run with `lockstep.Trainer` in the place of Lightning's Trainer. Only the class is
exchanged. Suites that the second table lacks were not run. Results are kept, and `--again` repeats what showed a bug,
so those of other tests may be some commits older. [For any Lightning project](../use/lightning.md) has what a program
sees.
"""


def run_suite(tests: Path, selected: Sequence[str], results: Path, lightnings: bool = False) -> None:
    """Run tests, and add a line for each to a file.

    Args:
        tests: Lightning's folder `tests`.
        selected: the tests, below `tests`.
        results: the file.
        lightnings: whether the Trainer stays Lightning's.
    """
    paths = os.pathsep.join([str(HERE), str(ROOT / "src"), str(tests)])
    more = {"PYTHONPATH": paths, "LIGHTNING_TESTS": str(results), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    more["TESTED_TRAINER"] = "lightning" if lightnings else "lockstep"
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tests)]
    command += ["-p", "exchanged_trainer", "-p", "no:randomly", "-p", "no:cacheprovider"]
    command += ["--timeout", "60", "--timeout-method", "signal"]
    command += ["--continue-on-collection-errors", *selected]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
    with results.with_suffix(".log").open("a") as log:
        subprocess.run(command, check=False, cwd=tests, env=environment | more, stdout=log, stderr=subprocess.STDOUT)


def rows_of(results: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results; none if it is not there."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def matching(reasons: Iterable[dict[str, Any]], text: str) -> str | None:
    """Return the reason of which a pattern is in a text."""
    return next((each["reason"] for each in reasons if any(re.search(one, text) for one in each["of"])), None)


def kind_of(row: dict[str, Any], fails_too: bool, reasons: dict[str, Any]) -> tuple[str, str | None]:
    """Return the kind of a test's result, and the reason if there is one."""
    refusal = row.get("refusal")
    if row["outcome"] != "failed":
        return (PASSED if row["outcome"] == "passed" else SKIPPED), None
    if fails_too:
        return TOO, None
    if refusal is not None and "there is no such option" in refusal:
        return UNKNOWN, None
    if refusal is not None and matching(reasons["machine"], refusal):
        return SKIPPED, None
    if refusal is not None and (reason := matching(reasons["refused"], refusal)):
        return REFUSED, reason
    if refusal is not None and row["expected"]:
        return BAD_INPUT, None
    if reason := matching(reasons["meant"], row["test"]):
        return MEANT, reason
    return BUG, None


def table_of_reasons(counted: Counter[tuple[str, str | None]], kind: str) -> str:
    """Return the reasons of a kind with their numbers, the largest first."""
    rows = [(reason, number) for (its, reason), number in counted.most_common() if its == kind]
    return markdown(["reason", "tests"], rows)


def failing(results: Path) -> set[str]:
    """Return the tests that failed."""
    return {row["test"] for row in rows_of(results) if row["outcome"] == "failed"}


def run_again(tests: Path, results: Path, too: set[str], reasons: dict[str, Any]) -> None:
    """Run again the tests of a suite that show a bug, and put the new results down."""
    rows = {row["test"]: row for row in rows_of(results)}
    kinds = {test: kind_of(row, test in too, reasons)[0] for test, row in rows.items()}
    if again := [test for test, kind in kinds.items() if kind == BUG]:
        new = results.with_suffix(".again")
        new.write_text("")
        run_suite(tests, again, new)
        rows |= {row["test"]: row for row in rows_of(new)}
        results.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))


def page(counted: Counter[tuple[str, str | None]], by_suite: dict[str, Counter[str]]) -> str:
    """Return the page."""
    totals: Counter[str] = Counter()
    for (kind, _), number in counted.items():
        totals[kind] += number
    versions = ", ".join(f"{name} {version(name)}" for name in ("lightning", "torch"))
    shown = [kind for kind in KINDS if totals[kind]]
    parts = [
        TITLE,
        f"Commit {commit_of(ROOT)[:10]}, {versions}, on a CPU: {totals.total()} tests.\n",
        markdown(["kind", "tests", "what it is"], [(kind, totals[kind], KINDS[kind]) for kind in KINDS]) + "\n",
        "## By suite\n",
        markdown(["tests_pytorch/", *shown], [(suite, *(each[k] for k in shown)) for suite, each in by_suite.items()]),
        f"\n## What is {REFUSED}\n",
        table_of_reasons(counted, REFUSED),
        f"\n## What is {MEANT}\n",
        table_of_reasons(counted, MEANT) + "\n",
    ]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--lightning", type=Path, required=True, help="a checkout of Lightning's repository")
    parser.add_argument("--results", type=Path, default=ROOT / "outputs" / "lightning_tests", help="a folder")
    parser.add_argument("--suites", nargs="+", help=f"some of: {' '.join(SUITES)}")
    parser.add_argument("--again", action="store_true", help="run again what showed a bug")
    options = parser.parse_args()
    tests = options.lightning.resolve() / "tests"
    if not (tests / "tests_pytorch").is_dir():
        print(f"{tests}: has no tests_pytorch: give --lightning a checkout of Lightning's repository", file=sys.stderr)
        return 2
    reasons = yaml.safe_load((HERE / "lightning_tests.yaml").read_text())
    results = options.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    counted: Counter[tuple[str, str | None]] = Counter()
    by_suite: dict[str, Counter[str]] = defaultdict(Counter)
    bugs = []
    for suite in options.suites or SUITES:
        ours, lightnings = (results / f"{suite.replace('/', '.')}.{whose}.jsonl" for whose in ("ours", "lightnings"))
        if not ours.exists():
            begun = ours.with_suffix(".begun")
            begun.write_text("")
            run_suite(tests, [f"tests_pytorch/{suite}"], begun)
            begun.rename(ours)
        if options.again:
            run_again(tests, ours, failing(lightnings), reasons)
        rows = rows_of(ours)
        failed = [row["test"] for row in rows if row["outcome"] == "failed" and row["refusal"] is None]
        if new := sorted(set(failed) - {row["test"] for row in rows_of(lightnings)}):
            run_suite(tests, new, lightnings, lightnings=True)
        too = failing(lightnings)
        for row in rows:
            kind, reason = kind_of(row, row["test"] in too, reasons)
            counted[kind, reason] += 1
            by_suite[suite][kind] += 1
            if kind == BUG:
                bugs.append(row)
        print(suite, dict(by_suite[suite]), flush=True)
    for row in bugs:
        print(row["test"].partition("tests_pytorch/")[2], row["error"], row["message"][:200], *row["at"][-2:], sep="  ")
    PAGE.write_text(page(counted, by_suite))
    return 1 if bugs else 0


if __name__ == "__main__":
    raise SystemExit(main())
