"""Runs side by side: a sweep, or any runs:

    python scripts/compare.py outputs/mnist_cnn_digits/sweeps/<stamp>
    python scripts/compare.py outputs/mnist_cnn_digits/<one> outputs/mnist_cnn_digits/<other> ...

Runs that differ in nothing but their seed are one row. The table comes to the terminal, and as compare.md and
compare.json into the folder given (`--to` names another), with plots: loss, accuracy, speed. `--by lr` adds a table and
a plot of test accuracy against a key, with a column and a line for each choice of the other keys. Exactly two runs are
compared in all that they say, to the bits of their weights. Exit codes: 0 compared, 2 bad input.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from common.showing import markdown
from comparison import pair
from comparison.runs import Group, Lines, against, brief, find_runs, grouped, is_run

from lockstep.arithmetic.layout import Refusal, counted

CAPTION = (
    "mean over seeds, +- their standard deviation; efficiency: samples/s of a device against the fastest run on one; "
    "GiB: largest process"
)
FORMATS = {"test acc": ".4f", "+-": ".4f", "val acc": ".4f", "samples/s": ",.0f", "efficiency": ".0%"}
FORMATS |= {"GiB": ".2f", "seconds": ".1f"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="folder", help="a run, or a folder with runs in it")
    parser.add_argument("--by", metavar="key", help="that the runs differ in, a number")
    parser.add_argument("--to", type=Path, metavar="folder", help="where table and plots go")
    given = parser.parse_args()
    try:
        if len(given.runs) == 2 and not given.by and all(map(is_run, given.runs)):
            print(pair.report(*given.runs))
        else:
            compare(given.runs, given.by, given.to)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def compare(folders: Sequence[Path], key: str | None, to: Path | None) -> None:
    """Prints and writes the table, the best first, and draws.

    Raises:
        Refusal: there is nothing to compare.
    """
    groups = sorted(grouped(runs := find_runs(folders)), key=result, reverse=True)
    lines = against(groups, key) if key else {}
    rows = [group.row() for group in groups]
    text = markdown([*rows[0]], [[shown(column, value) for column, value in row.items()] for row in rows])
    text += "\n\n" + "\n".join([CAPTION, *remarks(groups, len(runs))]) + "\n"
    if key:
        text += f"\n{by_key(lines, key)}\n"
    print(text)

    folder = to or Path(os.path.commonpath([run.absolute() for run in folders])) / "compare"
    folder.mkdir(parents=True, exist_ok=True)
    from comparison.charts import draw, draw_against  # matplotlib takes a second

    plots = draw(groups, folder) + ([draw_against(lines, key, folder)] if key else [])
    (folder / "compare.md").write_text(text + "".join(f"\n![]({name})\n" for name in plots))
    for row, group in zip(rows, groups, strict=True):
        row["folders"] = {str(run.folder): run.summary.get("status") for run in group.runs}
    (folder / "compare.json").write_text(json.dumps(rows, indent=2) + "\n")
    print(f"{os.path.relpath(folder)}: {', '.join(['compare.md', 'compare.json', *plots])}")


def result(group: Group) -> tuple[float, float]:
    """By test accuracy, else validation accuracy; those without either last."""
    test, val = (group.mean(f"metrics.{name}") for name in ("test/acc", "val/acc"))
    return -1.0 if test is None else test, -1.0 if val is None else val


def shown(column: str, value: Any) -> str:
    return pair.ABSENT if value is None else f"{value:{FORMATS[column]}}" if column in FORMATS else str(value)


def remarks(groups: Sequence[Group], runs: int) -> list[str]:
    """What is not in the numbers, and why."""
    left_out = runs - sum(len(group.runs) for group in groups)
    said = [f"left out: {counted(left_out, 'folder')} of what trained nothing"] if left_out else []
    for group in groups:
        for run in group.runs:
            if not run.completed:
                told = (run.summary.get("status", "without an end"), run.summary.get("error"))
                said.append(f"{run.folder.name} ({group.label}): {', '.join(filter(None, told))}")
    return said


def by_key(lines: Lines, key: str) -> str:
    """A row for each value of the key, a column for each line."""

    def cell(accuracy: Sequence[float]) -> str:
        spread = f" +- {stdev(accuracy):.4f}" if len(accuracy) > 1 else ""
        return f"{fmean(accuracy):.4f}{spread}" if accuracy else ""

    values = sorted({value for points in lines.values() for value in points})
    rows = ([brief(value), *(cell(points.get(value, [])) for points in lines.values())] for value in values)
    return markdown([key, *lines], rows)


if __name__ == "__main__":
    sys.exit(main())
