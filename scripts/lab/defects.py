"""Make mistakes in the library, one at a time, and see whether the tests find them:

    python scripts/lab/defects.py
    python scripts/lab/defects.py --only 'batch_norm,io' tests -m 'unit or ranks'

defects.yaml lists the mistakes: a file of src/lockstep, the text that is replaced, the new text, what it breaks, and
the file of tests that is run first. Each is made in a copy of the repository, where pytest then runs until a test
fails: first those tests, then the given ones. A mistake that no test finds shows a missing test, or code without use.
Without arguments, the table becomes docs/results/defects.md.

Exit codes: 0 all are found, 1 not.
"""

import argparse
import importlib.util
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from nightly import commit_of

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_suffix(".yaml")
PAGE = ROOT / "docs" / "results" / "defects.md"
TITLE = """# Planted mistakes that the tests find

Each of these mistakes was made in the library, alone, and tests ran until one failed: those of `make quick` in the
rooms step, checkpoint, data and arithmetic. `python scripts/lab/defects.py` does it, and
`scripts/lab/defects.yaml` has the lines that are changed.
"""
COPIED = ("src", "conf", "scripts", "tests", "docs", "pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile")
ROOMS = ("tests/step", "tests/checkpoint", "tests/data", "tests/arithmetic")
LIMIT = 900  # seconds for the tests of one defect; a step that waits forever counts as found


def read_defects(path: Path = LIST) -> list[dict[str, str]]:
    """Return the defects of a list."""
    listed: list[dict[str, str]] = yaml.safe_load(path.read_text())
    return listed


def changed(text: str, defect: dict[str, str]) -> str:
    """Return the text of a file with a defect."""
    if (count := text.count(defect["old"])) != 1:
        raise SystemExit(f"{defect['file']}: {defect['old']!r} occurs {count} times: it must occur once")
    return text.replace(defect["old"], defect["new"])


def copy_repository(folder: Path) -> None:
    """Copy what tests need into a folder."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
        else:
            shutil.copy2(ROOT / name, folder / name)


def finding_test(folder: Path, defect: dict[str, str], arguments: Sequence[str]) -> str:
    """Return the name of a test that finds a defect, or what else happens; empty if all tests pass."""
    file, output = folder / "src" / "lockstep" / defect["file"], folder / "output.txt"
    original = file.read_text()
    try:
        _write(file, changed(original, defect))
        process = multiprocessing.get_context("fork").Process(target=_run_pytest, args=(folder, output, arguments))
        process.start()
        process.join(LIMIT)
        if process.exitcode is None:
            process.kill()
            process.join()
            return "hangs"
    finally:
        _write(file, original)
    text = output.read_text()
    if process.exitcode == 0:
        return ""
    if process.exitcode in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(text)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    return failed[1] if failed else f"exit code {process.exitcode}"


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    # its time has whole seconds, in which a file of the same size may have changed
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def _run_pytest(folder: Path, output: Path, arguments: Sequence[str]) -> None:
    os.chdir(folder)
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(pytest.main(["-x", "-q", "-n", "0", "-p", "no:randomly", "-p", "no:cacheprovider", *arguments]))


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", type=Path, default=LIST, help="another list of defects")
    parser.add_argument("--only", default="", help="parts of file names or of what breaks, with commas between them")
    options, chosen = parser.parse_known_args()
    import lightning.pytorch  # noqa: F401 # now, so that each child has it already

    wanted: Any = [part.strip() for part in options.only.split(",")]
    listed = read_defects(options.list)
    defects = [each for each in listed if any(part in f"{each['file']}: {each['breaks']}" for part in wanted)]
    tests, commit = chosen or [*ROOMS, "-m", "unit or ranks"], commit_of(ROOT)
    lines: list[str] = []
    detected = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        for defect in defects:
            test = finding_test(Path(folder), defect, [defect["test"], *tests])
            detected += bool(test)
            lines.append(f"{defect['file']}: {defect['breaks']}\n    {test or 'not found'}")
            print(lines[-1], flush=True)
    figures = f"{detected} of {len(defects)} found"
    print(f"\n{figures}")
    if len(sys.argv) == 1:
        PAGE.write_text("\n".join([TITLE, f"{figures}, commit {commit}.", "", "```text", *lines, "```", ""]))
    return int(detected < len(defects))


if __name__ == "__main__":
    sys.exit(main())
