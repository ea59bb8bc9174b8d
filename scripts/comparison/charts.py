"""Plots of groups of runs as PNG: loss, accuracy, speed. A group has its colour, line and marker in all of them, so
that they can be told apart without colour too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common.showing import our_pyplot, style
from comparison.curves import Curve
from comparison.groups import Group

pyplot = our_pyplot()
MOST = 12  # groups in a plot of curves; the most accurate ones
GRID = 200  # points of a mean over seeds
DECADE = 10  # from the least to the most, from which on an axis is logarithmic
WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # behind a number, where a line may pass


def draw(groups: Sequence[Group], folder: Path) -> list[str]:
    """Draws what the groups have data for; returns the files' names."""
    shown = [group for group in groups if group.completed]
    styles = {id(group): style(number) for number, group in enumerate(shown)}
    best = sorted(shown, key=lambda group: -(group.mean("metrics", "test/acc") or 0))[:MOST]
    curved = [group for group in shown if group in best]
    some = f" (the best {MOST} of {len(shown)})" if len(shown) > MOST else ""
    made = []
    for name, tag, title in (
        ("loss.png", "train/loss", f"Training loss{some}"),
        ("accuracy.png", "val/acc", f"Validation accuracy{some}"),
    ):
        if any(tag in run.curves for group in curved for run in group.completed):
            _curves(curved, styles, tag, title, folder / name)
            made.append(name)
    if any(group.mean("throughput", "samples_per_second") for group in shown):
        _bars(shown, styles, folder / "speed.png")
        made.append("speed.png")
    return made


def _curves(groups: Sequence[Group], styles: dict[int, Any], tag: str, title: str, path: Path) -> None:
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    names = {"samples": "samples seen", "seconds": "seconds of training, validation included"}
    for panel, axis in zip(panels, names, strict=True):
        for number, group in enumerate(groups):
            curves = [run.curves[tag] for run in group.completed if tag in run.curves]
            _mean(panel, curves, axis, group.label, styles[id(group)], number / len(groups))
        panel.set(xlabel=names[axis])
        panel.set_xlim(left=0)
    panels[0].locator_params(axis="x", nbins=5)
    panels[0].xaxis.set_major_formatter("{x:,.0f}")
    panels[0].set_ylabel(tag)
    least, most = panels[0].dataLim.intervaly
    if tag == "train/loss" and least > 0 and most / least >= DECADE:
        panels[0].set_yscale("log")
    handles, labels = panels[0].get_legend_handles_labels()
    several = any(len(group.completed) > 1 for group in groups)
    figure.suptitle(title + (": mean over seeds, and from the least to the most" if several else ""))
    columns = max(1, min(6, 120 // (6 + max(map(len, labels)))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    figure.savefig(path)
    pyplot.close(figure)


def _mean(panel: Any, curves: Sequence[Curve], axis: str, label: str, look: dict[str, Any], shift: float) -> None:
    """The seeds' mean value at the same samples seen, and the mean second at which they were."""
    if not curves:
        return
    samples = curves[0].samples
    if len(curves) > 1:
        samples = np.linspace(max(c.samples[0] for c in curves), min(c.samples[-1] for c in curves), GRID)
    values = np.stack([np.interp(samples, curve.samples, curve.values) for curve in curves])
    seconds = np.stack([np.interp(samples, curve.samples, curve.seconds) for curve in curves])
    x = samples if axis == "samples" else seconds.mean(0)
    every = max(1, len(x) // 6)
    marks = (int(shift * every), every)  # lines that coincide still show all their markers
    panel.plot(x, values.mean(0), label=label, markevery=marks, markersize=5, linewidth=1.5, **look)
    ends = values.min(0), values.max(0)
    if len(curves) > 1 and x[0] < x[-1]:
        panel.fill_between(x, *ends, color=look["color"], alpha=0.12, linewidth=0)
    elif len(curves) > 1:  # one validation each
        panel.vlines(x[0], ends[0][0], ends[1][0], color=look["color"], linewidth=1)


def _bars(groups: Sequence[Group], styles: dict[int, Any], path: Path) -> None:
    """Samples per second; how well devices are used stands in the table."""
    measured = [group for group in groups if group.mean("throughput", "samples_per_second")]
    figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.36 * len(measured)))
    speeds = [group.values("throughput", "samples_per_second") for group in measured]
    means = [float(np.mean(values)) for values in speeds]
    ends = [[mean - min(values), max(values) - mean] for mean, values in zip(means, speeds, strict=True)]
    several = any(len(values) > 1 for values in speeds)
    spread = {"xerr": np.transpose(ends), "ecolor": "#555555", "capsize": 3} if several else {}
    colours = [styles[id(group)]["color"] for group in measured]
    bars = axes.barh(range(len(measured)), means, color=colours, **spread)
    axes.bar_label(bars, [f"{mean:,.0f}" for mean in means], padding=6, fontsize=8, bbox=WHITE)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("samples per second" + (", from slowest to fastest seed" if several else ""))
    axes.set_yticks(range(len(measured)), [group.label for group in measured], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.grid(False, axis="y")
    figure.suptitle("Speed")
    figure.savefig(path)
    pyplot.close(figure)
