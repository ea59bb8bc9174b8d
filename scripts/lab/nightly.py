"""Run the tests that are too long for CI, and write docs/results/nightly.md.

    python scripts/lab/nightly.py
    python scripts/lab/nightly.py tests/test_promise_6_chaos.py -n 0

These are the tests marked `nightly` and, with more examples, those of hypothesis. Arguments are pytest's. The page is
written only where all of them were selected.
"""

import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "nightly.md"
SELECTED = ("-n", "2", "--dist", "worksteal", "-m", "nightly or hypothesis or lab", "--hypothesis-profile=nightly")
VERSIONS = ("torch", "lightning", "hydra-core", "torchmetrics", "pytest")
FAILED = ("failure", "error")


def outcomes(report: Path) -> dict[str, list[str]]:
    """Read a report in the form of JUnit. Return the names of the tests that passed, failed and were skipped."""
    parts: dict[str, set[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):  # a test that fails at its end as well has two
        name = f"{case.get('classname', '').replace('.', '/')}.py: {case.get('name')}"
        parts.setdefault(name, set()).update(part.tag for part in case)
    tests: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for name, tags in sorted(parts.items()):
        tests["failed" if tags & {*FAILED} else "skipped" if "skipped" in tags else "passed"].append(name)
    return tests


def page(tests: Mapping[str, list[str]], seconds: float, commit: str) -> str:
    """Return the page about one run of the tests."""
    rows = {outcome: str(len(names)) for outcome, names in tests.items()}
    rows |= {"seconds": f"{seconds:.0f}", "commit": commit, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    rows |= {"Python": platform.python_version()} | {name: version(name) for name in VERSIONS}
    lines = [
        "# The last nightly tests",
        "",
        "`make nightly` runs what is too long for each change: storms of faults, each deleted extra, emulated",
        "processors, the commands of all pages, the measurements of scripts/lab/, and more examples of the tests by",
        "hypothesis. It wrote this page.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
    ]
    for outcome in ("failed", "skipped"):
        if tests[outcome]:
            lines += ["", f"{outcome.capitalize()}:", "", *(f"- `{name}`" for name in tests[outcome])]
    return "\n".join([*lines, ""])


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout, with a note if files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
        ).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + (" and changes" if git("status", "--porcelain") else "")


def main() -> int:
    """Run the program; return pytest's exit code."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__)
        return 0
    commit, began = commit_of(ROOT), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *SELECTED, f"--junitxml={report}", *sys.argv[1:]]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code in (0, 1) and not sys.argv[1:]:
            PAGE.write_text(page(outcomes(report), time.monotonic() - began, commit))
            print(f"wrote {PAGE.relative_to(ROOT)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
