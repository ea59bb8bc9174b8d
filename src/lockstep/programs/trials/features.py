"""Compare runs that use a feature on a few layouts.

They must agree up to rounding; under exact, bit for bit, also if they are killed in mid-epoch and resumed on another
layout. The controls are a run without the feature, and one in which each rank applies it wrongly. The control of a row
with another model, whose weights can't be compared with those of a run without it, sums gradients without the mean.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from lockstep.config.check import check
from lockstep.data import Splits
from lockstep.programs.trials.judging import Row, evaluation, judge, measured
from lockstep.programs.trials.trial import FULL_STEPS, YARDSTICKS, Outcome, Trial, layout_changes, run, with_counter

Changes = dict[str, Any]
Prepared = Callable[[Sequence[str]], tuple[Changes, Splits]]  # overrides -> config and data
LAYOUTS = {
    "1 device": ("auto", 1),
    "ddp, 2 devices": ("ddp", 2),
    "ddp, 3 devices": ("ddp", 3),
    "dp, 2 devices": ("dp", 2),
}
STEPS = FULL_STEPS + 1  # the least number of steps: one epoch
COLUMNS = {
    "default": "by default",
    "exact": "exact=true",
    "resumed": "killed on ddp 3, resumed on dp 2",
    "without": "control: without it",
    "by rank": "control: by rank",
}
# The fault of a rank that uses its own samples instead of the step's (see trials.faults), by the start of an override.
BY_RANK = {
    "callbacks=ema": "decayed",
    "model.class_weights": "weighted",
    "data.mix": "seeded",
    "model.dropout": "seeded",
    "model=": "summed",
}


def measure(
    features: Mapping[str, Sequence[str]], prepared: Prepared, steps: int, folder: Path
) -> dict[str, list[Row]]:
    """Return the rows of each feature, given by name and overrides. A row's kind is one of COLUMNS."""
    results = {}
    for number, (name, overrides) in enumerate(with_counter(list(features.items()), "feature")):
        results[name] = _rows(list(overrides), prepared, steps, folder / f"{number:02d}")
    return results


def _rows(overrides: list[str], prepared: Prepared, steps: int, folder: Path) -> list[Row]:
    raw, splits = prepared(overrides)
    pieces = check(raw).layout.pieces
    layouts = {name: layout_changes(strategy, devices, pieces) for name, (strategy, devices) in LAYOUTS.items()}
    made = 0

    def outcome(
        name: str, fault: str | None = None, exact: bool = False, killed_on: str | None = None, flip: int = 0
    ) -> Outcome:
        nonlocal made
        made += 1
        first_layout = layouts[killed_on] | {"exact": exact} if killed_on else None
        trial = Trial(name, layouts[name] | {"exact": exact}, fault, flip, whole=True, first_layout=first_layout)
        return run(trial, raw, steps, splits, folder / f"{made:02d}")

    one, two, three, dp = layouts
    reference, exact = outcome(one), outcome(one, exact=True)
    side = measured(reference, [outcome(one, flip=flip) for flip in YARDSTICKS.values()])
    rows = [judge("default", (name, ""), outcome(name), reference, side) for name in (two, three, dp)]
    rows += [judge("exact", (name, ""), outcome(name, exact=True), exact, side) for name in (two, three, dp)]
    resumed = outcome(dp, exact=True, killed_on=three)
    same = resumed.sha256 == exact.sha256 and evaluation(resumed) == evaluation(exact)
    rows.append(Row("resumed", dp, "", "same bits" if same else "DIFFERENT", same, same_bits=same))
    if not any(override.startswith("model=") for override in overrides):
        without, bare = prepared([])
        plain = run(Trial("", layouts[one], whole=True), without, steps, bare, folder / "without")
        rows.append(replace(judge("control", (one, ""), plain, reference, side), kind="without"))
    for word, fault in BY_RANK.items():
        if any(override.startswith(word) for override in overrides):
            row = judge("control", (two, ""), outcome(two, fault), reference, side)
            rows.append(replace(row, kind="by rank"))
    return rows


def table(results: Mapping[str, Sequence[Row]]) -> Table:
    """Return a table with a line for each feature. A cell has the verdicts, or the first that is not as promised."""
    shown = Table("", *COLUMNS.values(), box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for name, rows in results.items():
        shown.add_row(name, *(_cell([row for row in rows if row.kind == kind]) for kind in COLUMNS))
    return shown


def _cell(rows: Sequence[Row]) -> str:
    wrong = next((row for row in rows if not row.passed), None)
    if wrong:
        return f"[bold red]{wrong.layout}: {wrong.verdict}[/]"
    text = ", ".join(dict.fromkeys(row.verdict for row in rows)) or "-"
    if text == "same to rounding":
        text += f", {max(row.distances['weights'] for row in rows):.0e}"
    return f"[green]{text}[/]"
