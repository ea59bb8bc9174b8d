"""Compare two trials and show the result: distances, tolerance, verdict, table, plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from lockstep.programs.common.showing import BLUE, GREEN, GREY, PURPLE, VERMILION, our_pyplot
from lockstep.programs.trials.trial import Outcome, difference, norm
from lockstep.text import join_names

MARGIN = 10  # the tolerance is the yardstick times this
ENDS = ("weights", "buffers", "gradient")  # compared after the last step


@dataclass(frozen=True)
class Distances:
    """The relative distances of a trial from its reference, at the end and after each step."""

    weights: float
    buffers: float
    gradient: float
    weights_curve: NDArray[Any]  # of some of the weights, see trials.record.PROBES
    loss_curve: NDArray[Any]

    @property
    def loss(self) -> float:
        """The largest distance of the loss at any step."""
        return float(self.loss_curve.max())

    def leaves(self, tolerance: "Distances") -> int:
        """Return the first step (1, 2, ...) after which a distance is beyond the tolerance. Return 0 if none is."""
        inside = (self.weights_curve <= tolerance.weights_curve) & (self.loss_curve <= tolerance.loss_curve)
        inside[-1] &= all(getattr(self, name) <= getattr(tolerance, name) for name in ENDS)
        return 0 if inside.all() else int(inside.argmin()) + 1  # nan counts as outside


def distances(result: Outcome, reference: Outcome) -> Distances:
    """Return the distances of `result` from `reference`. Losses are relative to the reference's largest.

    Weights whose gradient is only rounding in the reference are left out, since their steps have any direction.
    """
    left_out, judged = reference.rounding, ~reference.rounding_probes
    scale = norm(reference.probes[0][judged]) or 1.0
    pairs = zip(result.probes[:, judged], reference.probes[:, judged], strict=True)
    return Distances(
        difference(result.weights, reference.weights, left_out),
        difference(result.buffers, reference.buffers),
        difference(result.gradients, reference.gradients, left_out),
        np.array([norm(now - then) / scale for now, then in pairs]),
        np.abs(result.losses - reference.losses) / np.abs(reference.losses).max(),
    )


def allowed(yardsticks: Sequence[Distances], roundoff: float) -> Distances:
    """Return the tolerance.

    It is MARGIN times the largest yardstick, or times one rounding per step if that is more.
    """
    floor = roundoff * np.arange(1, len(yardsticks[0].loss_curve) + 1)
    ends = [MARGIN * max(floor[-1], *(getattr(yardstick, name) for yardstick in yardsticks)) for name in ENDS]
    curves = [
        np.max([getattr(yardstick, name) for yardstick in yardsticks], axis=0)
        for name in ("weights_curve", "loss_curve")
    ]
    return Distances(*ends, *(MARGIN * np.maximum(np.maximum.accumulate(curve), floor) for curve in curves))


@dataclass(frozen=True)
class Row:
    """The comparison of a trial with its reference.

    `kind` is `default` or `exact` (a layout), `late` (a layout under exact with gradients one step later), `pieces`
    (another number of pieces), `control` or `yardstick`.
    """

    kind: str
    layout: str
    pieces: str  # of each device
    verdict: str
    passed: bool
    same_samples: bool | None = None  # in every piece of every step
    same_bits: bool | None = None
    distances: Distances | None = None
    evaluated: str = ""  # correct/count of the test

    def plain(self) -> dict[str, Any]:
        """Return the row for JSON."""
        fields = {**vars(self)}
        if self.distances is not None:
            curves = {name: getattr(self.distances, name).tolist() for name in ("weights_curve", "loss_curve")}
            fields["distances"] = vars(self.distances) | curves
        return fields


def judge(kind: str, names: tuple[str, str], result: Outcome, reference: Outcome, tolerance: Distances | None) -> Row:
    """Return a trial's row. Under exact the bits decide the verdict, otherwise the distances."""
    distance = distances(result, reference)
    same_bits = result.sha256 == reference.sha256
    same_samples = result.samples == reference.samples
    evaluated, expected = (evaluation(outcome) for outcome in (result, reference))
    left = distance.leaves(tolerance) if tolerance is not None else 0
    if kind == "yardstick":
        verdict, passed = "yardstick", True
    elif kind == "control":
        passed = bool(left) or not same_samples
        verdict = f"seen, after step {left}" if left else "seen: other samples" if passed else "NOT SEEN"
    elif kind == "pieces" and left and result.sensitive:
        verdict, passed = f"legal: {' and '.join(result.sensitive)}, other pieces", True
    elif kind in ("exact", "late") and result is not reference and reference.config.layout.exact:
        passed = same_bits and same_samples and evaluated == expected
        verdict = "same bits" if passed else "DIFFERENT"
    else:  # rounding may move a test sample across the decision boundary, but the count must be equal
        passed = not left and (same_samples or kind == "pieces") and evaluated[1:] == expected[1:]
        verdict = f"DIFFERENT{f', after step {left}' if left else ''}" if not passed else "same to rounding"
    if result is reference:
        verdict = "reference"
    shown = "/".join(map(str, evaluated))
    return Row(kind, *names, verdict, passed, None if kind == "pieces" else same_samples, same_bits, distance, shown)


def evaluation(outcome: Outcome) -> list[int]:
    """Return the correct and the counted samples of the test, if the module logs them."""
    return [int(outcome.metrics[name]) for name in ("test/correct", "test/count") if name in outcome.metrics]


def table(rows: Sequence[Row]) -> Table:
    """Return the table of all rows. Each kind has a section."""
    names = ("", "layout", "pieces", "samples", "bits", *ENDS, "loss", "correct", "verdict")
    shown = Table(*names, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    words = {True: "same", False: "differ", None: ""}
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        away = ["" if row.distances is None else f"{getattr(row.distances, name):.1e}" for name in (*ENDS, "loss")]
        verdict = f"[{'green' if row.passed else 'bold red'}]{row.verdict}[/]"
        end = after is not None and after.kind != row.kind and "yardstick" not in (row.kind, after.kind)
        same = words[row.same_samples], words[row.same_bits]
        shown.add_row(row.kind, row.layout, row.pieces, *same, *away, row.evaluated, verdict, end_section=end)
    return shown


def explain(reference: Outcome, tolerance: Distances) -> str:
    """Return the text below the table: the steps, the tolerance, and the reason for it."""
    layout, precision = reference.config.layout, reference.config.precision
    steps, curve = len(reference.losses), tolerance.weights_curve
    lines = [
        f"{steps} steps of {layout.batch_size} samples in {layout.pieces} pieces, {precision}. Distances "
        "are relative: norms, the largest of all tensors; loss: the largest of all steps.",
        f"Tolerance by default, after each step: {MARGIN} x what roundings of the gradient have become on this model, "
        f"and at least {MARGIN} roundings of the weights a step: "
        f"{curve[0]:.1e} of the weights after step 1 and {curve[-1]:.1e} after step {steps}. Under exact=true: none.",
    ]
    if names := [name for name, each in reference.rounding.items() if each.all()]:
        lines.append(
            f"Not compared by default: {join_names(names, 5)}. The gradient is only rounding there, as that of a bias "
            "before BatchNorm, and an optimizer such as AdamW makes whole steps of it."
        )
    if curve[-1] > MARGIN * 0.01:
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
    "yardstick": (GREY, ":", "gradients off by roundings"),
}


def plot(rows: Sequence[Row], tolerance: Distances, path: Path) -> None:
    """Plot the relative difference of the weights over the steps."""
    pyplot = our_pyplot()
    shown = [(row, row.distances.weights_curve) for row in rows if row.distances and row.verdict != "reference"]
    seen = np.concatenate([*(curve for _, curve in shown), tolerance.weights_curve])
    steps = np.arange(1, len(tolerance.weights_curve) + 1)
    figure, axes = pyplot.subplots(figsize=(8, 4.8))
    known = set()
    marks = iter("osD^vP")  # for the controls
    for row, curve in shown:
        kind = "exact" if row.same_bits else "default" if row.kind in ("exact", "late") else row.kind
        colour, line, label = STYLES[kind]
        look: dict[str, Any] = {"zorder": 3, "clip_on": False} if row.same_bits else {}
        if kind == "control":
            look, label = {"marker": next(marks), "markersize": 4}, f"control: {row.layout}"
        axes.plot(steps, curve, line, color=colour, label=None if label in known else label, **look)
        known.add(label)
    axes.plot(steps, tolerance.weights_curve, color="black", linewidth=1, label="tolerance")
    # The scale is linear below the smallest difference, so that zero can be drawn.
    axes.set_yscale("symlog", linthresh=10 ** np.floor(np.log10(seen[seen > 0].min())), linscale=0.5)
    axes.set(xlabel="optimizer step", ylabel="relative difference of the weights", ylim=(0, None))
    axes.locator_params(axis="x", integer=True)
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path)
    pyplot.close(figure)
