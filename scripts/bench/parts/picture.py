"""The figures of docs/benchmarks/ as a picture: our time as a share of the other's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from plotting import BLUE, GREY, VERMILION, find_pyplot

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
COLUMNS = {"ours": 0.11, "other": 0.31, "share": 0.46, "times\nas fast": 0.61, "goal": 0.67}  # where, in their panel
INK, FAINT = "#222222", "#E4E4E4"
ROW = 0.22  # inches
SPACE = 1.3  # rows, of a heading
Row = dict[str, Any]


def draw(folder: Path, path: Path) -> bool:
    """Draws what is there; False where nothing can be drawn: no matplotlib, or no figures."""
    pyplot = find_pyplot()
    files = {part: folder / f"{part}.json" for part in HEADINGS}
    found = {part: json.loads(file.read_text()) for part, file in files.items() if file.exists()}
    groups = {part: rows for part, report in found.items() if (rows := [row for row in report["rows"] if _shown(row)])}
    if pyplot is None or not groups:
        return False
    lines = sum(map(len, groups.values())) + SPACE * len(groups)
    with pyplot.rc_context({"figure.dpi": 120, "font.size": 8.5, "text.color": INK, "ytick.color": INK}):
        figure, (bars, numbers) = pyplot.subplots(1, 2, figsize=(11.5, ROW * lines + 1.6), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12)
        numbers.axis("off")
        _shares(bars, numbers, groups)
        handles, labels = bars.get_legend_handles_labels()
        known = dict(zip(labels, handles, strict=True))
        title = f"Our time as a share of the other's: shorter is faster\n{_where(found)}"
        legend = figure.legend(known.values(), known, ncols=5, loc="outside upper center", frameon=False, title=title)
        legend.get_title().set(fontsize=11, multialignment="center")
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


def _shares(bars: Any, numbers: Any, groups: dict[str, list[Row]]) -> None:
    """A bar for each row, and beside it a line of numbers, which so lie over nothing."""
    at, ticks = 0.0, []
    for part, rows in groups.items():
        at += SPACE
        look = {"ha": "right", "va": "center_baseline", "weight": "bold"}
        bars.text(-0.01, at, HEADINGS[part], transform=bars.get_yaxis_transform(), **look)
        for row in rows:
            at += 1
            ticks.append((at, re.sub("times as fast as|part of", "against", row["what"])))
            _share(bars, numbers, at, row)
    bars.axvline(1, color=INK, linewidth=0.9)
    bars.set_yticks(*zip(*ticks, strict=True))
    for panel in (bars, numbers):
        panel.set_ylim(at + 0.8, 0)
    bars.margins(x=0.03)
    bars.set_xlim(left=0)
    bars.grid(axis="x", color=FAINT)
    bars.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    bars.set_axisbelow(True)
    bars.tick_params(length=0)
    bars.spines[:].set_visible(False)
    for name, x in COLUMNS.items():
        numbers.text(x, 0.7, name, ha="left" if name == "goal" else "right", va="bottom", color=GREY)


def _share(bars: Any, numbers: Any, at: float, row: Row) -> None:
    turn = (lambda value: 1 / value) if row["at_least"] else (lambda value: value)
    share, missed = turn(row["ratio"]), row["met"] is False
    colour, label = (VERMILION, "goal missed") if missed else (BLUE, "goal met")
    if row["goal"] is None:
        colour, label = GREY, "control: the other against itself"
    bars.barh(at, share, color=colour, alpha=0.55, height=0.62, label=label)
    told = {
        "ours": _side(row["ours"], row["unit"]),
        "other": _side(row["other"], row["unit"]),
        "share": f"{share:.1%}" if share < 0.1 else f"{share:.0%}",
        "times\nas fast": _short(1 / share),
    }
    if row["spread"]:
        ends = [turn(end) for end in row["spread"]]
        bars.plot(ends, [at, at], color=INK, linewidth=1.3, solid_capstyle="butt", label="quartiles over rounds")
    if row["goal"] is not None:
        bars.plot([turn(row["goal"])] * 2, [at - 0.36, at + 0.36], color=INK, linewidth=2.4, label="goal")
        told["goal"] = f"at most {turn(row['goal']):.0%}{': missed' * missed}"
    for name, text in told.items():
        look = {"weight": "bold"} if name == "share" else {"color": VERMILION} if name == "goal" and missed else {}
        numbers.text(COLUMNS[name], at, text, ha="left" if name == "goal" else "right", va="center_baseline", **look)


def _side(value: float, unit: str) -> str:
    return f"{_short(1000 * value)} ms" if unit == "s" and value < 1 else f"{_short(value)} {unit}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"
