"""Groups of runs side by side: a row each, for the terminal and as files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from comparison.groups import Cell, Group
from comparison.pair import ABSENT
from rich import box
from rich.table import Table

from lockstep.arithmetic.layout import counted

CAPTION = (
    "mean over seeds, +- their standard deviation; efficiency: samples/s of a device against the fastest run on one; "
    "GiB: largest process; bold: best"
)
FORMATS = {
    "test acc": ".4f",
    "+-": ".4f",
    "val acc": ".4f",
    "samples/s": ",.0f",
    "efficiency": ".0%",
    "GiB": ".2f",
    "seconds": ".1f",
}


@dataclass
class Comparison:
    """All groups, the best first: by test accuracy, else validation accuracy; those without either last."""

    groups: list[Group]
    left_out: int = 0  # folders that trained nothing

    def __post_init__(self) -> None:
        self.groups = sorted(self.groups, key=_result, reverse=True)
        self.rows = [group.row() for group in self.groups]

    def best(self) -> set[tuple[int, str]]:
        """Row and column of the best values, where there is something to choose."""
        found = set()
        for column in ("test acc", "samples/s"):
            values = [row[column] for row in self.rows]
            if len(known := {float(value) for value in values if value is not None}) > 1:
                found |= {(number, column) for number, value in enumerate(values) if value == max(known)}
        return found

    def table(self) -> Table:
        shown = Table(box=box.SIMPLE_HEAD, caption=CAPTION, caption_justify="left")
        for column in self.rows[0]:
            shown.add_column(column, justify="left" if column == "layout" else "right", no_wrap=column == "layout")
        best = self.best()
        for number, row in enumerate(self.rows):
            cells = ((column, text(column, value)) for column, value in row.items())
            shown.add_row(*(f"[bold]{cell}[/]" if (number, column) in best else cell for column, cell in cells))
        return shown

    def remarks(self) -> list[str]:
        """Runs that are not in the numbers, and why."""
        others = [f"left out: {counted(self.left_out, 'folder')} of what trained nothing"] if self.left_out else []
        return others + [
            f"{run.folder.name}{f' ({group.label})' * bool(group.label)}: {run.summary.get('status', 'without an end')}"
            + (f", {run.summary['error']}" if run.summary.get("error") else "")
            for group in self.groups
            for run in group.runs
            if not run.completed
        ]

    def write(self, folder: Path, plots: Sequence[str], against: str = "") -> None:
        """compare.md, with the table `against` a key where there is one, and compare.json."""
        rows, best = self.rows, self.best()
        lines = ["| " + " | ".join(rows[0]) + " |", "|---" + "|---:" * (len(rows[0]) - 1) + "|"]
        for number, row in enumerate(rows):
            cells = {column: text(column, value).replace("|", "\\|") for column, value in row.items()}
            cells |= {column: f"**{cells[column]}**" for at, column in best if at == number}
            lines.append("| " + " | ".join(cells.values()) + " |")
        lines += [
            "",
            CAPTION,
            "",
            *filter(None, [against]),
            "",
            *(f"- {remark}" for remark in self.remarks()),
            *(f"\n![]({name})" for name in plots),
        ]
        (folder / "compare.md").write_text("\n".join(lines) + "\n")
        told = [
            {**row, "folders": {str(run.folder): run.summary.get("status") for run in group.runs}}
            for row, group in zip(rows, self.groups, strict=True)
        ]
        (folder / "compare.json").write_text(json.dumps(told, indent=2) + "\n")


def _result(group: Group) -> tuple[float, ...]:
    row = group.row()
    found = (row.get(column) for column in ("test acc", "val acc"))
    return tuple(float("-inf") if value is None else float(value) for value in found)


def text(column: str, value: Cell) -> str:
    """A cell for people."""
    return ABSENT if value is None else f"{value:{FORMATS[column]}}" if column in FORMATS else str(value)
