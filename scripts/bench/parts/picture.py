"""The figures of docs/benchmarks/ as a picture: our time as a share of the other's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.showing import BLUE, GREY, VERMILION, find_pyplot

PARTS = ("step", "start", "accuracy", "scaling", "pieces", "gpu")  # memory's are no times
Row = dict[str, Any]


def draw(folder: Path, path: Path) -> bool:
    """Draws what is there; False where nothing can be drawn: no matplotlib, or no figures."""
    pyplot = find_pyplot()
    files = [folder / f"{part}.json" for part in PARTS]
    reports = [json.loads(file.read_text()) for file in files if file.exists()]
    rows = [row for report in reports for row in report["rows"] if _shown(row)]
    if pyplot is None or not rows:
        return False
    shares = [_share(row, row["ratio"]) for row in rows]
    figure, axes = pyplot.subplots(figsize=(12.5, 0.24 * len(rows) + 1.4), layout="constrained")
    axes.barh(range(len(rows)), shares, color=[_colour(row) for row in rows], alpha=0.55)
    for at, row in enumerate(rows):
        if row["spread"]:
            axes.plot([_share(row, end) for end in row["spread"]], [at, at], color="black", linewidth=1.3)
        if row["goal"] is not None:
            axes.plot([_share(row, row["goal"])] * 2, [at - 0.36, at + 0.36], color="black", linewidth=2.4)
        axes.text(1.01, at, _numbers(row), transform=axes.get_yaxis_transform(), va="center", fontsize=7)
    axes.axvline(1, color="black", linewidth=0.9)
    axes.set_yticks(range(len(rows)), [row["what"] for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        "Our time as a share of the other's: shorter is faster. Blue: goal met, red: missed, grey: a control. "
        f"Thin: quartiles, thick: goal.\n{_where(reports)}",
        fontsize=8,
        loc="right",
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _shown(row: Row) -> bool:
    """Ratios of times that have a goal, and the controls, which show what the machine can tell."""
    ratio = row["spread"] is not None or row["at_least"]
    return ratio and row["unit"] == "s" and (row["goal"] is not None or "control" in row["what"])


def _where(reports: list[Any]) -> str:
    """What the figures were measured on, and when."""
    machines = {f"{report['machine']['processor']}, torch {report['versions']['torch']}" for report in reports}
    days = sorted({report["date"].partition("T")[0] for report in reports})
    return f"{'; '.join(sorted(machines))}; {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def _colour(row: Row) -> str:
    return GREY if row["goal"] is None else BLUE if row["met"] else VERMILION


def _share(row: Row, ratio: float) -> float:
    """Of the other's time; some ratios say how many times as fast ours is."""
    return 1 / ratio if row["at_least"] else ratio


def _numbers(row: Row) -> str:
    sides = row["ours"], row["other"]
    ours, other = (f"{1000 * side:.3g} ms" if side < 1 else f"{side:.3g} s" for side in sides)
    goal = "" if row["goal"] is None else f", goal {_share(row, row['goal']):.0%}"
    return f"{_share(row, row['ratio']):.0%}: {ours} against {other}{goal}"
