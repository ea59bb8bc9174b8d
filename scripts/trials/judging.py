"""What parity.py concludes from two trials, and how it shows that: distances, tolerance, verdict, table, plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common.showing import BLUE, GREEN, GREY, PURPLE, VERMILION, our_pyplot
from numpy.typing import NDArray
from rich import box
from rich.table import Table
from trials.trial import Outcome, difference, norm

MARGIN = 10  # times the yardstick
ENDS = ("weights", "buffers", "gradient")  # compared after the last step


@dataclass(frozen=True)
class Distances:
    """How far a trial is from its reference, all relative: at the end, and after each step."""

    weights: float
    buffers: float
    gradient: float
    weights_curve: NDArray[Any]  # of a sample of the weights, see trials.record.PROBES
    loss_curve: NDArray[Any]

    @property
    def loss(self) -> float:
        """The largest of all steps."""
        return float(self.loss_curve.max())

    def leaves(self, tolerance: "Distances") -> int:
        """The first step (1, 2, ...) after which something is further away than allowed; 0: none."""
        inside = (self.weights_curve <= tolerance.weights_curve) & (self.loss_curve <= tolerance.loss_curve)
        inside[-1] &= all(getattr(self, name) <= getattr(tolerance, name) for name in ENDS)
        return 0 if inside.all() else int(inside.argmin()) + 1  # nan is not inside


def distances(result: Outcome, reference: Outcome) -> Distances:
    """How far `result` is from `reference`; losses relative to the largest of the reference."""
    scale = norm(reference.probes[0]) or 1.0
    return Distances(
        difference(result.weights, reference.weights),
        difference(result.buffers, reference.buffers),
        difference(result.gradients, reference.gradients),
        np.array([norm(now - then) / scale for now, then in zip(result.probes, reference.probes, strict=True)]),
        np.abs(result.losses - reference.losses) / np.abs(reference.losses).max(),
    )


def allowed(yardsticks: Sequence[Distances], roundoff: float) -> Distances:
    """The tolerance: MARGIN times the largest of the yardsticks, or of a rounding a step, where that is more."""
    floor = roundoff * np.arange(1, len(yardsticks[0].loss_curve) + 1)
    ends = [MARGIN * max(floor[-1], *(getattr(yardstick, name) for yardstick in yardsticks)) for name in ENDS]
    curves = [
        np.max([getattr(yardstick, name) for yardstick in yardsticks], axis=0)
        for name in ("weights_curve", "loss_curve")
    ]
    return Distances(*ends, *(MARGIN * np.maximum(np.maximum.accumulate(curve), floor) for curve in curves))


@dataclass(frozen=True)
class Row:
    """A trial against its reference.

    `kind` is `default` or `exact` (a layout), `late` (one under exact, with gradients a step later), `pieces` (another
    number of them), `control` or `yardstick`.
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
        """For JSON."""
        fields = {**vars(self)}
        if self.distances is not None:
            curves = {name: getattr(self.distances, name).tolist() for name in ("weights_curve", "loss_curve")}
            fields["distances"] = vars(self.distances) | curves
        return fields


def judge(kind: str, names: tuple[str, str], result: Outcome, reference: Outcome, tolerance: Distances | None) -> Row:
    """A trial's row: under exact the bits decide, else the distances."""
    away = distances(result, reference)
    same_bits = result.sha256 == reference.sha256
    same_samples = result.samples == reference.samples
    evaluated, expected = (evaluation(outcome) for outcome in (result, reference))
    left = away.leaves(tolerance) if tolerance is not None else 0
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
    else:  # summed in another order: a test sample on the edge may fall on the other side, but none is lost
        passed = not left and (same_samples or kind == "pieces") and evaluated[1:] == expected[1:]
        verdict = f"DIFFERENT{f', after step {left}' if left else ''}" if not passed else "same to rounding"
    if result is reference:
        verdict = "reference"
    shown = "/".join(map(str, evaluated))
    return Row(kind, *names, verdict, passed, None if kind == "pieces" else same_samples, same_bits, away, shown)


def evaluation(outcome: Outcome) -> list[int]:
    """Correct and counted samples of the test, where the module logs them as ours do."""
    return [int(outcome.metrics[name]) for name in ("test/correct", "test/count") if name in outcome.metrics]


def table(rows: Sequence[Row]) -> Table:
    """One table; a section for the default arithmetic, for exact, for late gradients, for another number of pieces, for
    the controls."""
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
    """What was done, and which tolerance was used, and why."""
    layout, precision = reference.config.layout, reference.config.precision
    steps, curve = len(reference.losses), tolerance.weights_curve
    lines = [
        f"{steps} steps of {layout.batch_size} samples in {layout.pieces} pieces, {precision}. Distances "
        "are relative: norms, the largest of all tensors; loss: the largest of all steps.",
        f"Tolerance by default, after each step: {MARGIN} x what roundings of the gradient have become on this model, "
        f"and at least {MARGIN} roundings of the weights a step: "
        f"{curve[0]:.1e} of the weights after step 1 and {curve[-1]:.1e} after step {steps}. Under exact=true: none.",
    ]
    if curve[-1] > MARGIN * 0.01:
        lines.append(
            "On this model rounding grows so much that by default only the first steps tell anything (see the plot): "
            "a smaller lr, larger pieces or fewer steps tame it; exact=true does not need that."
        )
    return "\n".join(lines)


STYLES = {  # colour, line, what the legend says
    "default": (BLUE, "-", "layouts, by default"),
    "exact": (GREEN, "-", "layouts, exact=true: no difference"),
    "pieces": (PURPLE, "-.", "another number of pieces"),
    "control": (VERMILION, "--", ""),  # each by its name
    "yardstick": (GREY, ":", "gradients off by roundings"),
}


def plot(rows: Sequence[Row], tolerance: Distances, path: Path) -> None:
    """The difference of the weights over the steps."""
    pyplot = our_pyplot()
    shown = [(row, row.distances.weights_curve) for row in rows if row.distances and row.verdict != "reference"]
    seen = np.concatenate([*(curve for _, curve in shown), tolerance.weights_curve])
    steps = np.arange(1, len(tolerance.weights_curve) + 1)
    figure, axes = pyplot.subplots(figsize=(8, 4.8))
    known = set()
    marks = iter("osD^vP")  # of the controls
    for row, curve in shown:
        kind = "exact" if row.same_bits else "default" if row.kind in ("exact", "late") else row.kind
        colour, line, label = STYLES[kind]
        look: dict[str, Any] = {"zorder": 3, "clip_on": False} if row.same_bits else {}
        if kind == "control":
            look, label = {"marker": next(marks), "markersize": 4}, f"control: {row.layout}"
        axes.plot(steps, curve, line, color=colour, label=None if label in known else label, **look)
        known.add(label)
    axes.plot(steps, tolerance.weights_curve, color="black", linewidth=1, label="tolerance")
    # linear below the smallest difference, so that there is a place for none
    axes.set_yscale("symlog", linthresh=10 ** np.floor(np.log10(seen[seen > 0].min())), linscale=0.5)
    axes.set(xlabel="optimizer step", ylabel="relative difference of the weights", ylim=(0, None))
    axes.locator_params(axis="x", integer=True)
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path)
    pyplot.close(figure)
