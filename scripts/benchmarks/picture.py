"""The figures of docs/benchmarks/ as a picture: ratios with their goals, and a step's time by part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# of Okabe and Ito's palette, which colour-blind readers can tell apart
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999", "#000000"]
SHOWN = ("step", "epoch", "start", "accuracy")


def draw(folder: Path, path: Path) -> bool:
    """Draws what is there; False where nothing can be drawn: no matplotlib, or no figures."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("agg")
    from matplotlib import pyplot

    found = {
        name: json.loads((folder / f"{name}.json").read_text()) for name in SHOWN if (folder / f"{name}.json").exists()
    }
    limits = json.loads((folder / "limit.json").read_text())["limits"] if (folder / "limit.json").exists() else []
    rows = [
        row
        for name, report in found.items()
        for row in report["rows"]
        if row["goal"] is not None and (name != "start" or row["spread"])  # the others there are seconds
    ]
    if not (rows and limits):
        return False
    height = [0.3 * len(rows) + 1, 0.45 * len(limits) + 1.6]
    figure, (above, below) = pyplot.subplots(2, figsize=(11, sum(height)), height_ratios=height, layout="constrained")
    _ratios(above, rows)
    _parts(below, limits)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _ratios(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Ours as a part of the other's time, so that less is always better, with goals."""
    for at, row in enumerate(reversed(rows)):
        turn = (lambda value: 1 / value) if row["at_least"] else (lambda value: value)
        value, goal = turn(row["ratio"]), turn(row["goal"])
        axes.barh(at, value, color=COLOURS[0 if value <= goal else 5], height=0.6)
        if row["spread"]:
            axes.plot([turn(end) for end in row["spread"]], [at, at], color="black", linewidth=1)
        axes.plot([goal, goal], [at - 0.4, at + 0.4], color="black", linestyle=":")
        axes.text(value + 0.01, at, f" {value:.2f}", va="center", fontsize=8)
    axes.axvline(1, color="gray", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["what"] for row in reversed(rows)], fontsize=8)
    axes.set_xlabel("our time over the other's (line: quartiles, dots: goal; orange: not met)")
    axes.spines[["top", "right"]].set_visible(False)


def _parts(axes: Any, limits: list[dict[str, Any]]) -> None:
    names = sorted({name for limit in limits for name in limit["parts"]}, key=lambda name: -_most(limits, name))
    for at, limit in enumerate(reversed(limits)):
        left = 0.0
        for colour, name in zip(COLOURS, names, strict=False):
            share = limit["parts"].get(name, 0.0)
            axes.barh(at, share, left=left, color=colour, height=0.6, label=name if at == 0 else None)
            if share > 0.04:
                axes.text(left + share / 2, at, f"{share:.0%}", ha="center", va="center", fontsize=8, color="white")
            left += share
    labels = [f"{limit['model']}, {limit['precision']}" for limit in reversed(limits)]
    axes.set_yticks(range(len(limits)), labels, fontsize=8)
    axes.set_xlabel("share of a step's time (under torch's profiler, which makes Python look larger than it is)")
    axes.set_xlim(0, 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=5, fontsize=7, loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False)


def _most(limits: list[dict[str, Any]], name: str) -> float:
    return max(limit["parts"].get(name, 0.0) for limit in limits)
