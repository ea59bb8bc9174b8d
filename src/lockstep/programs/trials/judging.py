"""Compare two trials as `lockstep same` compares two programs, and show the result: verdict, table, plot."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from lockstep.programs.common.showing import BLUE, GREEN, GREY, PURPLE, VERMILION, our_pyplot
from lockstep.programs.sameness.causes import BATCH_NORMS
from lockstep.programs.sameness.judging import MARGIN, Pair
from lockstep.programs.sameness.recorded import Run, Side
from lockstep.programs.trials.trial import Outcome
from lockstep.text import plural

STAGES = ("weights", "buffers", "gradients")  # whose distances after the last step are shown
HIDES = 0.01  # a share of the weights' size: larger rounding hides mistakes


@dataclass(frozen=True)
class Row:
    """The comparison of a trial with its reference.

    `kind` is `default` or `exact` (a layout), `pieces` (another number of pieces), `control` or `yardstick` (the
    reference again, or with a flipped bit of each weight).

    Attributes:
        distances: by stage, after the last step.
        curve: the distance of the weights after each step.
    """

    kind: str
    layout: str
    pieces: str  # of each device
    verdict: str
    passed: bool
    same_samples: bool | None = None  # in every step
    same_bits: bool | None = None
    distances: dict[str, float] = field(default_factory=dict)
    curve: list[float] = field(default_factory=list)
    evaluated: str = ""  # correct/count of the test

    def plain(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return vars(self)


def measured(reference: Outcome, yardsticks: Sequence[Outcome]) -> Side:
    """Return a reference with the runs that measure rounding: itself again first, then with flipped bits."""
    again, *flipped = (outcome.run for outcome in yardsticks)
    return Side("the reference", reference.run, again, tuple(flipped))


def judge(kind: str, names: tuple[str, str], result: Outcome, reference: Outcome, side: Side) -> Row:
    """Return a trial's row. Under exact the bits decide the verdict, otherwise what rounding does.

    Args:
        kind: see `Row`.
        names: layout and pieces.
        result: the trial.
        reference: what it is compared with.
        side: what rounding does; see `measured`.
    """
    pair = Pair(replace(side, run=reference.run), Side(names[0], result.run))
    same_bits = result.sha256 == reference.sha256
    same_samples = all(result.run.samples(step) == reference.run.samples(step) for step in range(1, pair.length + 1))
    evaluated, expected = (evaluation(outcome) for outcome in (result, reference))
    step = None if kind == "yardstick" or result is reference else pair.first_difference
    if kind == "yardstick" or result is reference:
        verdict, passed = "yardstick" if kind == "yardstick" else "reference", True
    elif kind == "control":
        passed = step is not None or not same_samples
        verdict = f"seen, from step {step}" if step else "seen: other samples" if passed else "NOT SEEN"
    elif kind == "pieces" and step and (kinds := sensitive(result.run)):
        verdict, passed = f"legal: {' and '.join(kinds)}, other pieces", True
    elif kind == "exact" and reference.config.layout.exact:
        passed = same_bits and same_samples and evaluated == expected
        verdict = "same bits" if passed else "DIFFERENT"
    else:  # rounding may move a test sample across the decision boundary, but the count must be equal
        passed = step is None and (same_samples or kind == "pieces") and evaluated[1:] == expected[1:]
        verdict = "same to rounding" if passed else "DIFFERENT" if step is None else f"DIFFERENT, from step {step}"
    distances = {stage: pair.largest(stage, pair.length) for stage in STAGES}
    curve = [pair.largest("weights", step) for step in range(1, pair.length + 1)]
    return Row(
        kind, *names, verdict, passed, None if kind == "pieces" else same_samples, same_bits, distances, curve,
        "/".join(map(str, evaluated)),
    )  # fmt: skip


def sensitive(run: Run) -> list[str]:
    """Return what makes a step depend on how it is cut into pieces."""
    norms = any(run.first.modules.get(name) for name in (*BATCH_NORMS, "SyncBatchNorm"))
    drawn = any(each.drawn for each in run.passes(1))
    return ["BatchNorm"] * norms + ["dropout"] * drawn


def evaluation(outcome: Outcome) -> list[int]:
    """Return the correct and the counted samples of the test, if the module logs them."""
    return [int(outcome.metrics[name]) for name in ("test/correct", "test/count") if name in outcome.metrics]


def table(rows: Sequence[Row]) -> Table:
    """Return the table of all rows. Each kind has a section."""
    names = ("", "layout", "pieces", "samples", "bits", *STAGES, "correct", "verdict")
    shown = Table(*names, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    words = {True: "same", False: "differ", None: ""}
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        away = [f"{row.distances[stage]:.1e}" if row.distances else "" for stage in STAGES]
        verdict = f"[{'green' if row.passed else 'bold red'}]{row.verdict}[/]"
        end = after is not None and after.kind != row.kind and "yardstick" not in (row.kind, after.kind)
        same = words[row.same_samples], words[row.same_bits]
        shown.add_row(row.kind, row.layout, row.pieces, *same, *away, row.evaluated, verdict, end_section=end)
    return shown


def rounding_of(rows: Sequence[Row]) -> list[float]:
    """Return how far rounding takes the weights up to each step, of the yardsticks."""
    largest = np.max([row.curve for row in rows if row.kind == "yardstick"], axis=0)
    steps: list[float] = np.maximum.accumulate(largest).tolist()
    return steps


def explain(reference: Outcome, rounding: Sequence[float]) -> str:
    """Return the text below the table: the steps, and what rounding does."""
    layout, precision = reference.config.layout, reference.config.precision
    lines = [
        f"{plural(len(rounding), 'step')} of {layout.batch_size} samples in {layout.pieces} pieces, {precision}. "
        "Distances are shares of the size of all tensors together, after the last step.",
        f"By default a tensor of any step may be {MARGIN:.0f} x as far apart as in the yardsticks, which measure what "
        f"rounding does on this model: {rounding[0]:.1e} of the weights at step 1, {rounding[-1]:.1e} at step "
        f"{len(rounding)}. Under exact=true all bits are the same.",
    ]
    if rounding[-1] > HIDES:
        lines.append(
            "On this model rounding grows so much that by default only the first steps are a test (see the plot): "
            "use a smaller lr, larger pieces or fewer steps. Under exact=true this is not needed."
        )
    return "\n".join(lines)


STYLES = {  # colour, line, label of the legend
    "default": (BLUE, "-", "layouts, by default"),
    "exact": (GREEN, "-", "layouts, exact=true: no difference"),
    "pieces": (PURPLE, "-.", "another number of pieces"),
    "control": (VERMILION, "--", ""),  # each has its own label
    "yardstick": (GREY, ":", "one flipped bit of each weight"),
}


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plot the relative difference of the weights over the steps."""
    pyplot = our_pyplot()
    shown = [row for row in rows if row.curve and row.verdict != "reference"]
    seen = np.concatenate([row.curve for row in shown])
    figure, axes = pyplot.subplots(figsize=(8, 4.8))
    known = set()
    marks = iter("osD^vP")  # for the controls
    for row in shown:
        kind = "exact" if row.same_bits else "default" if row.kind == "exact" else row.kind
        colour, line, label = STYLES[kind]
        look: dict[str, Any] = {"zorder": 3, "clip_on": False} if row.same_bits else {}
        if kind == "control":
            look, label = {"marker": next(marks), "markersize": 4}, f"control: {row.layout}"
        steps = np.arange(1, len(row.curve) + 1)
        axes.plot(steps, row.curve, line, color=colour, label=None if label in known else label, **look)
        known.add(label)
    # The scale is linear below the smallest difference, so that zero can be drawn.
    axes.set_yscale("symlog", linthresh=10 ** np.floor(np.log10(seen[seen > 0].min())), linscale=0.5)
    axes.set(xlabel="optimizer step", ylabel="relative difference of the weights", ylim=(0, None))
    axes.locator_params(axis="x", integer=True)
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path)
    pyplot.close(figure)
