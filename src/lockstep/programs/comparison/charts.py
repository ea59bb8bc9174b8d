"""Plots of groups of runs as PNG: loss and accuracy.

A group has the same colour, line and marker in both plots, so that readers can tell groups apart without colour too.
"""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.files import write
from lockstep.programs.common.showing import our_pyplot, style
from lockstep.programs.comparison.runs import Group

pyplot = our_pyplot()
MAX_GROUPS = 12  # groups in a plot of curves: the most accurate, which come first
GRID = 200  # points at which the seeds' curves are averaged
DECADE = 10  # the axis is logarithmic if the largest value is this many times the smallest, or more


def draw_curves(groups: Sequence[Group], folder: Path) -> list[str]:
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


def _save(figure: Any, path: Path) -> None:
    content = BytesIO()
    figure.savefig(content)
    write(path, content.getbuffer())
    pyplot.close(figure)
