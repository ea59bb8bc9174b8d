"""Runs side by side: a sweep, or any runs:

    python scripts/compare.py outputs/mnist_cnn_digits/sweeps/<stamp>
    python scripts/compare.py outputs/mnist_cnn_digits/<one> outputs/mnist_cnn_digits/<other> ...

Runs that differ in nothing but their seed are one row. The table comes to the terminal, and as compare.md and
compare.json into the folder given (`--to` names another), with plots: loss, accuracy, speed. `--by lr` adds a table and
a plot of test accuracy against a key, with a column and a line for each choice of the other keys. Exactly two runs are
compared in all that they say, to the bits of their weights. Exit codes: 0 compared, 2 bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from common.showing import wide_console
from comparison import by_key, pair
from comparison.groups import find_runs, grouped, is_run
from comparison.table import Comparison

from lockstep.arithmetic.layout import Refusal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="folder", help="a run, or a folder with runs in it")
    parser.add_argument("--by", metavar="key", help="that the runs differ in, a number")
    parser.add_argument("--to", type=Path, metavar="folder", help="where table and plots go")
    given = parser.parse_args()
    console = wide_console(160, highlight=False)
    try:
        if len(given.runs) == 2 and not given.by and all(map(is_run, given.runs)):
            pair.report(console, (given.runs[0], given.runs[1]))
            return 0
        groups = grouped(runs := find_runs(given.runs))
        found = Comparison(groups, len(runs) - sum(len(group.runs) for group in groups))
        lines = by_key.lines(groups, given.by) if given.by else {}
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    folder = given.to or Path(os.path.commonpath([run.absolute() for run in given.runs])) / "compare"
    from comparison.charts import draw  # matplotlib takes a second

    console.print(found.table())
    for line in found.remarks():
        console.print(line, markup=False)
    against = by_key.table(lines, given.by) if lines else ""
    if against:
        print(against)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plots = draw(found.groups, folder) + ([by_key.draw(lines, given.by, folder)] if lines else [])
        found.write(folder, plots, against)
    except OSError as error:
        print(f"error: {error.filename or folder}: {error.strerror}", file=sys.stderr)
        return 2
    written = ", ".join(["compare.md", "compare.json", *plots])
    console.print(f"{os.path.relpath(folder)}: {written}", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
