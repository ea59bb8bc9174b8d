"""Test accuracy against one key that a sweep has varied, with a line for each choice of the other keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from common.showing import our_pyplot, style
from comparison.groups import Group, brief

from lockstep.arithmetic.layout import Refusal

Lines = dict[str, dict[float, list[float]]]  # by label: by the key's value, of each run


def lines(groups: Sequence[Group], key: str) -> Lines:
    """Those with two values of the key or more.

    Raises:
        Refusal: there is none.
    """
    found: dict[tuple[str, ...], dict[float, list[float]]] = {}
    for group in groups:
        value = group.runs[0].config.get(key)
        if isinstance(value, int | float) and group.completed:
            others = {name: other for name, other in group.differs.items() if name != key and other is not None}
            said = [f"{name.rpartition('.')[2]}={brief(other)}" for name, other in others.items()]
            found.setdefault((group.layout_name, *said), {})[value] = group.values("metrics", "test/acc")
    found = {names: dict(sorted(points.items())) for names, points in sorted(found.items()) if len(points) > 1}
    if not found:
        raise Refusal(f"--by {key}: no completed runs differ in a number of that name, and in nothing else")
    layouts = len({layout for layout, *_ in found}) > 1
    return {", ".join(names[not layouts :]) or "all": points for names, points in found.items()}


def table(found: Lines, key: str) -> str:
    """Markdown: a row for each value of the key, a column for each line."""
    rows = [f"| {key} | " + " | ".join(found) + " |", "|---:" * (len(found) + 1) + "|"]
    for value in sorted({value for points in found.values() for value in points}):
        cells = [_cell(points.get(value, [])) for points in found.values()]
        rows.append(f"| {brief(value)} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _cell(accuracy: Sequence[float]) -> str:
    spread = f" +- {stdev(accuracy):.4f}" if len(accuracy) > 1 else ""
    return f"{fmean(accuracy):.4f}{spread}" if accuracy else ""


def draw(found: Lines, key: str, folder: Path) -> str:
    """Returns the file's name."""
    pyplot = our_pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    values = sorted({value for points in found.values() for value in points})
    for number, (label, points) in enumerate(found.items()):
        at = [values.index(value) for value in points]
        means = [fmean(accuracy) for accuracy in points.values()]
        ends = [[mean - min(a) for mean, a in zip(means, points.values(), strict=True)]]
        ends += [[max(a) - mean for mean, a in zip(means, points.values(), strict=True)]]
        axes.errorbar(at, means, yerr=ends, capsize=3, label=label, **style(number))
    axes.set_xticks(range(len(values)), [brief(value) for value in values])
    axes.set(xlabel=key, ylabel="test accuracy: mean, and from the least to the most")
    axes.legend()
    name = f"by_{key.rpartition('.')[2]}.png"
    figure.savefig(folder / name)
    pyplot.close(figure)
    return name
