"""The figures of docs/benchmarks/ as a picture: our time as a share of the other's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from showing import BLUE, GREY, VERMILION, find_pyplot

HEADINGS = {
    "step": "a step",
    "epoch": "training on MNIST",
    "start": "start",
    "accuracy": "from the command to an accuracy",
    "scaling": "two workers",
    "pieces": "pieces, exact sums",
    "gpu": "on a GPU",
}
TIMES = {"s", "images/s"}  # units whose ratio is one of times
Row = dict[str, Any]


def draw(folder: Path, path: Path) -> bool:
    """Draws what is there; False where nothing can be drawn: no matplotlib, or no figures."""
    pyplot = find_pyplot()
    files = {part: folder / f"{part}.json" for part in HEADINGS}
    found = {part: json.loads(file.read_text()) for part, file in files.items() if file.exists()}
    groups = {part: rows for part, report in found.items() if (rows := [row for row in report["rows"] if _shown(row)])}
    if pyplot is None or not groups:
        return False
    lines: list[tuple[str, Row | None]] = []
    for part, rows in groups.items():
        lines.append((HEADINGS[part], None))
        lines += [(re.sub("times as fast as|part of", "against", row["what"]), row) for row in rows]
    with pyplot.rc_context({"figure.dpi": 120, "font.size": 8.5}):
        figure, axes = pyplot.subplots(figsize=(11.5, 0.22 * len(lines) + 1.6), layout="constrained")
        numbers = axes.twinx()
        for at, (_, row) in enumerate(lines):
            if row is not None:
                _bar(axes, at, row)
        axes.axvline(1, color="black", linewidth=0.9)
        for side, texts in (
            (axes, [name for name, _ in lines]),
            (numbers, [_numbers(row) if row else "" for _, row in lines]),
        ):
            side.set_ylim(len(lines) - 0.4, -0.8)
            side.set_yticks(range(len(lines)), texts)
            side.tick_params(length=0)
            side.spines[:].set_visible(False)
        for label, (_, row) in zip(axes.get_yticklabels(), lines, strict=True):
            label.set_fontweight("normal" if row else "bold")
        axes.set_xlim(left=0)
        axes.grid(axis="x", color="#E4E4E4")
        axes.set_axisbelow(True)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        handles, labels = axes.get_legend_handles_labels()
        known = dict(zip(labels, handles, strict=True))
        title = f"Our time as a share of the other's: shorter is faster\n{_where(found)}"
        figure.legend(known.values(), known, ncols=5, loc="outside upper center", frameon=False, title=title)
        figure.savefig(path)
        pyplot.close(figure)
    return True


def _shown(row: Row) -> bool:
    """Ratios of times that have a goal, and the controls, which show what the machine can tell."""
    ratio = row["spread"] is not None or row["at_least"]
    return ratio and row["unit"] in TIMES and (row["goal"] is not None or "control" in row["what"])


def _where(reports: dict[str, Any]) -> str:
    """What the figures were measured on, and when."""
    machines = {
        f"{report['machine']['processor']}, {report['machine']['cores']} cores, torch {report['versions']['torch']}"
        for report in reports.values()
    }
    days = sorted({report["date"].partition("T")[0] for report in reports.values()})
    return f"{'; '.join(sorted(machines))}; {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def _bar(axes: Any, at: float, row: Row) -> None:
    colour, label = (VERMILION, "goal missed") if row["met"] is False else (BLUE, "goal met")
    if row["goal"] is None:
        colour, label = GREY, "control: the other against itself"
    axes.barh(at, _share(row, row["ratio"]), color=colour, alpha=0.55, height=0.62, label=label)
    if row["spread"]:
        ends = [_share(row, end) for end in row["spread"]]
        axes.plot(ends, [at, at], color="black", linewidth=1.3, label="quartiles over rounds")
    if row["goal"] is not None:
        axes.plot([_share(row, row["goal"])] * 2, [at - 0.36, at + 0.36], color="black", linewidth=2.4, label="goal")


def _share(row: Row, ratio: float) -> float:
    """Of the other's time; some ratios say how many times as fast ours is."""
    return 1 / ratio if row["at_least"] else ratio


def _numbers(row: Row) -> str:
    sides = " against ".join(
        f"{1000 * side:.3g} ms" if row["unit"] == "s" and side < 1 else f"{side:,.3g} {row['unit']}"
        for side in (row["ours"], row["other"])
    )
    goal = "" if row["goal"] is None else f", goal {_share(row, row['goal']):.0%}"
    return f"{_share(row, row['ratio']):.0%}: {sides}{goal}{', missed' * (row['met'] is False)}"
