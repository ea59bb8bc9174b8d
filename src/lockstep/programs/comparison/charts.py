"""Plots of groups of runs as PNG: loss, accuracy, speed.

A group has the same colour, line and marker in all plots, so that readers can tell groups apart without colour too.
"""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from lockstep.files import write
from lockstep.programs.common.showing import our_pyplot, style
from lockstep.programs.comparison.runs import Group, PlotLines, brief

pyplot = our_pyplot()
MAX_GROUPS = 12  # groups in a plot of curves: the most accurate, which come first
GRID = 200  # points at which the seeds' curves are averaged
DECADE = 10  # the axis is logarithmic if the largest value is this many times the smallest, or more


def draw_plots(groups: Sequence[Group], folder: Path) -> list[str]:
    """Draw the plots that the groups have data for. Return the names of the files."""
    shown = [group for group in groups if group.completed]
    some = f" (the best {MAX_GROUPS} of {len(shown)})" if len(shown) > MAX_GROUPS else ""
    made = []
    for name, tag, title in (
        ("loss.png", "train/loss", f"Training loss{some}"),
        ("accuracy.png", "val/acc", f"Validation accuracy{some}"),
    ):
        if any(tag in run.curves for group in shown[:MAX_GROUPS] for run in group.completed):
            _curves(shown[:MAX_GROUPS], tag, title, folder / name)
            made.append(name)
    if any(group.speed for group in shown):
        _speeds(shown, folder / "speed.png")
        made.append("speed.png")
    return made


def _curves(groups: Sequence[Group], tag: str, title: str, path: Path) -> None:
    """Draw the mean of the seeds' curves, over samples seen and over seconds.

    At each point the seconds are the mean over the seeds too.
    """
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    for number, group in enumerate(groups):
        curves = [run.curves[tag] for run in group.completed if tag in run.curves]
        if not curves:
            continue
        samples = curves[0].samples
        if len(curves) > 1:
            samples = np.linspace(max(c.samples[0] for c in curves), min(c.samples[-1] for c in curves), GRID)
        values = np.stack([np.interp(samples, curve.samples, curve.values) for curve in curves])
        seconds = np.stack([np.interp(samples, curve.samples, curve.seconds) for curve in curves])
        every = max(1, len(samples) // 6)
        marks = (number * every // len(groups), every)  # markers of lines that coincide stay visible
        for panel, x in zip(panels, (samples, seconds.mean(0)), strict=True):
            panel.plot(x, values.mean(0), label=group.label, markevery=marks, markersize=5, **style(number))
            panel.fill_between(x, values.min(0), values.max(0), color=style(number)["color"], alpha=0.12, linewidth=0)
    panels[0].set(xlabel="samples seen", ylabel=tag)
    panels[1].set(xlabel="seconds of training, validation included")
    panels[0].locator_params(axis="x", nbins=5)
    panels[0].xaxis.set_major_formatter("{x:,.0f}")
    least, most = panels[0].dataLim.intervaly
    if tag == "train/loss" and least > 0 and most / least >= DECADE:
        panels[0].set_yscale("log")
    several = any(len(group.completed) > 1 for group in groups)
    figure.suptitle(title + (": mean over seeds, and from the least to the most" if several else ""))
    handles, labels = panels[0].get_legend_handles_labels()
    columns = max(1, min(6, 120 // (6 + max(map(len, labels)))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    _save(figure, path)


def _speeds(groups: Sequence[Group], path: Path) -> None:
    """Draw the samples per second of each group. The table shows the efficiency."""
    speeds = [group.values("throughput.samples_per_second") or [0.0] for group in groups]
    figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.36 * len(groups)))
    means, ends = list(map(fmean, speeds)), _ends(speeds)
    colours = [style(number)["color"] for number in range(len(groups))]
    bars = axes.barh(range(len(groups)), means, xerr=ends, color=colours, ecolor="#555555", capsize=3)
    axes.bar_label(bars, [f"{mean:,.0f}" for mean in means], padding=6, fontsize=8)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("samples per second, from slowest to fastest seed")
    axes.set_yticks(range(len(groups)), [group.label for group in groups], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.grid(False, axis="y")
    _save(figure, path)


def draw_by_key(plot_lines: PlotLines, key: str, folder: Path) -> str:
    """Draw what `scores_by_key` returned against the key. Return the name of the file."""
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    values = sorted({value for points in plot_lines.values() for value in points})
    for number, (label, points) in enumerate(plot_lines.items()):
        at, accuracies = [values.index(value) for value in points], list(points.values())
        axes.errorbar(at, list(map(fmean, accuracies)), _ends(accuracies), capsize=3, label=label, **style(number))
    axes.set_xticks(range(len(values)), [brief(value) for value in values])
    axes.set(xlabel=key, ylabel="on the test set: mean, and from the least to the most")
    axes.legend()
    name = f"by_{key.rpartition('.')[2]}.png"
    _save(figure, folder / name)
    return name


def _ends(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the distances from each mean to its least and to its largest value."""
    return [[fmean(each) - min(each) for each in values], [max(each) - fmean(each) for each in values]]


def _save(figure: Any, path: Path) -> None:
    content = BytesIO()
    figure.savefig(content)
    write(path, content.getbuffer())
    pyplot.close(figure)
