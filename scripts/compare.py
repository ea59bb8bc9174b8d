"""Compare runs of a sweep, or any runs, side by side:

    python scripts/compare.py outputs/mnist_cnn_digits/sweeps/<stamp>
    python scripts/compare.py outputs/mnist_cnn_digits/<one> outputs/mnist_cnn_digits/<other> ...

Runs that differ only in the seed share a row. Rows are sorted by validation accuracy; test accuracy is shown but does
not affect the order. Notes below the table name the rows that took the same steps on different layouts.

The table is printed, and written as compare.md and compare.json into the folder given (`--to` names another), with
plots of loss, accuracy and speed. `--by lr` adds a table and a plot of test accuracy against a key; each choice of the
other keys is a column of the table and a line of the plot. Two runs are compared in detail, down to the bits of their
weights; `--why` finds the first step and the first layer at which they differ, and the cause.

Exit codes: 0 compared, 2 bad input.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from common.showing import markdown
from comparison import pair
from comparison.runs import Group, Lines, Run, against, brief, find_runs, grouped, is_run, same_steps

from lockstep.errors import UserError
from lockstep.text import plural

CAPTION = (
    "mean over seeds, +- their standard deviation; efficiency: samples/s of a device against the fastest run on one; "
    "GiB: largest process"
)
FORMATS = {"test acc": ".4f", "+-": ".4f", "val acc": ".4f", "samples/s": ",.0f", "efficiency": ".0%"}
FORMATS |= {"GiB": ".2f", "seconds": ".1f"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="folder", help="a run, or a folder with runs in it")
    parser.add_argument("--by", metavar="key", help="a key with numbers in which the runs differ")
    parser.add_argument("--to", type=Path, metavar="folder", help="folder for the table and the plots")
    parser.add_argument("--why", action="store_true", help="find the first difference of two runs, and its cause")
    arguments = parser.parse_args()
    try:
        if arguments.why:
            if len(arguments.runs) != 2:
                raise UserError(f"--why: {plural(len(arguments.runs), 'folder')}: give two run folders")
            from comparison import why  # torch takes seconds

            print(why.report(*arguments.runs))
        elif len(arguments.runs) == 2 and not arguments.by and all(map(is_run, arguments.runs)):
            print(pair.report(*arguments.runs))
        else:
            compare(arguments.runs, arguments.by, arguments.to)
    except UserError as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def compare(folders: Sequence[Path], key: str | None, to: Path | None) -> None:
    """Print and write the table, best rows first, and draw the plots.

    Raises:
        UserError: there is nothing to compare.
    """
    groups = sorted(grouped(runs := find_runs(folders)), key=result, reverse=True)
    lines = against(groups, key) if key else {}
    root = Path(os.path.commonpath([run.absolute() for run in folders]))
    rows = [{"folder": places(group, root), **group.row()} for group in groups]
    text = markdown([*rows[0]], [[shown(column, value) for column, value in row.items()] for row in rows])
    remarks = [best(groups), *roundings(groups, root), *oddities(groups, len(runs))]
    text += "\n\n" + "\n".join([f"folder: in {os.path.relpath(root)}; {CAPTION}", *filter(None, remarks)]) + "\n"
    if key:
        text += f"\n{by_key(lines, key)}\n"
    print(text)

    folder = to or root / "compare"
    folder.mkdir(parents=True, exist_ok=True)
    from comparison.charts import draw, draw_against  # matplotlib takes a second

    plots = draw(groups, folder) + ([draw_against(lines, key, folder)] if key else [])
    (folder / "compare.md").write_text(text + "".join(f"\n![]({name})\n" for name in plots))
    for row, group in zip(rows, groups, strict=True):
        row["folders"] = {str(run.folder): run.summary.get("status") for run in group.runs}
    (folder / "compare.json").write_text(json.dumps(rows, indent=2) + "\n")
    print(f"{os.path.relpath(folder)}: {', '.join(['compare.md', 'compare.json', *plots])}")


def result(group: Group) -> tuple[float, float]:
    """Return the sort key: validation accuracy, else validation loss. Runs without either come last."""
    acc, loss = (group.mean(f"metrics.val/{name}") for name in ("acc", "loss"))
    return -math.inf if acc is None else acc, -math.inf if loss is None else -loss


def places(group: Group, root: Path) -> str:
    """Return the group's folders relative to `root`. For the jobs of a sweep these are numbers."""
    return ", ".join(run.folder.name if run.folder.absolute() == root else run_place(run, root) for run in group.runs)


def run_place(run: Run, root: Path) -> str:
    return run.folder.absolute().relative_to(root).as_posix()


def best(groups: Sequence[Group]) -> str:
    """Return a line with the folders of the best runs, or nothing if there is no choice or no validation."""
    first = groups[0]
    if len(groups) == 1 or max(result(first)) == -math.inf:
        return ""
    return f"best by validation: {', '.join(os.path.relpath(run.folder) for run in first.completed)}"


def roundings(groups: Sequence[Group], root: Path) -> list[str]:
    """Return a sentence for each set of rows that took the same steps on different layouts."""
    sentences = []
    for members in same_steps(groups):
        rows = " and ".join(f"{places(group, root)} ({group.layout_name})" for group in members)
        exact, digests = members[0].layout("exact"), {group.digests for group in members}
        if len(digests) == 1:
            sentences.append(f"{rows} took the same steps, to the same bits of the weights.")
        elif exact:
            sentences.append(
                f"{rows} should have the same bits, but do not: scripts/parity.py shows where they differ."
            )
        else:
            sentences.append(
                f"{rows} took the same steps up to rounding, which depends on layout and threads: "
                "exact=true removes this too."
            )
    return sentences


def shown(column: str, value: Any) -> str:
    return pair.ABSENT if value is None else f"{value:{FORMATS[column]}}" if column in FORMATS else str(value)


def oddities(groups: Sequence[Group], runs: int) -> list[str]:
    """Return lines about the runs that the averages leave out, and why."""
    left_out = runs - sum(len(group.runs) for group in groups)
    lines = [f"left out: {plural(left_out, 'folder')} of runs that did not train"] if left_out else []
    for group in groups:
        for run in group.runs:
            if not run.completed:
                outcome = (run.summary.get("status", "did not finish"), run.summary.get("error"))
                lines.append(f"{run.folder.name} ({group.label}): {', '.join(filter(None, outcome))}")
    return lines


def by_key(lines: Lines, key: str) -> str:
    """Return a table with a row for each value of the key and a column for each line."""

    def cell(accuracy: Sequence[float]) -> str:
        spread = f" +- {stdev(accuracy):.4f}" if len(accuracy) > 1 else ""
        return f"{fmean(accuracy):.4f}{spread}" if accuracy else ""

    values = sorted({value for points in lines.values() for value in points})
    rows = ([brief(value), *(cell(points.get(value, [])) for points in lines.values())] for value in values)
    return markdown([key, *lines], rows)


if __name__ == "__main__":
    sys.exit(main())
