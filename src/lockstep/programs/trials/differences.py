"""Measure what may differ between two runs, by how much, and check the switch that removes the difference.

The runs of a pair differ in one thing. Compared are bits, weights and test accuracy. If there is a switch, the same
pair runs again with it. Another seed comes last, for scale. Kinds of GPU round differently too; that needs two of them
and is not measured.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.config.check import Config
from lockstep.data import Splits
from lockstep.programs.sameness.judging import Pair
from lockstep.programs.sameness.recorded import Side
from lockstep.programs.trials.trial import Outcome, Trial, layout_changes, run, with_counter

Changes = dict[str, Any]


@dataclass(frozen=True)
class Configs:
    """Two configs that differ in one thing, and the same two with the switch that removes it."""

    name: str
    one: Changes
    other: Changes
    switch: str = "-"
    switched: tuple[Changes, Changes] | None = None


@dataclass(frozen=True)
class Effect:
    """The difference of two runs: of the weights as a share of their size, and of the accuracy in percentage points."""

    same_bits: bool
    weights: float
    accuracy: float

    def __str__(self) -> str:
        return "same bits" if self.same_bits else f"{self.weights:.0e}, {self.accuracy:+.2f}"


def pairs(config: Config, model: Changes) -> list[Configs]:
    """Return the pairs for a model. All other keys are the same, and a step has the config's pieces."""
    pieces = config.layout.pieces
    common = {"exact": True, "threads": 1, "precision": "32-true"}
    one, two = layout_changes("auto", 1, pieces) | common, layout_changes("ddp", 2, pieces) | common
    halves = {"pieces": pieces // 2}
    what, without, switch = f"another number of pieces ({pieces}, {pieces // 2})", None, "-"
    if "norm" in model:
        what, switch, without = f"{what}, BatchNorm", "`model.norm=group`", one | {"model": model | {"norm": "group"}}
    elif model.get("dropout"):
        what, switch, without = f"{what}, dropout", "`model.dropout=0`", one | {"model": model | {"dropout": 0.0}}
    default = {"exact": False}
    return [
        Configs("order of summation (1 device, ddp on 2)", one | default, two | default, "`exact=true`", (one, two)),
        Configs(what, one, one | halves, switch, (without, without | halves) if without else None),
        Configs("`precision=bf16-mixed`", one, one | {"precision": "bf16-mixed"}, "`precision=32-true`"),
        Configs(
            "2 CPU threads in a worker", one, one | {"threads": 2}, "`threads=1`, as `exact=true` sets", (one, two)
        ),
        Configs("for scale: another seed", one, one | {"seed": config.seed + 1}),
    ]


def measure(
    config: Config, raw: dict[str, Any], steps: int, splits: Splits, folder: Path
) -> tuple[list[dict[str, Any]], str]:
    """Run all pairs. Return their numbers, and the table of docs/trust/parity.md."""
    known: dict[str, Outcome] = {}

    def outcome(changes: Changes) -> Outcome:
        key = repr(sorted(changes.items()))
        if key not in known:
            known[key] = run(Trial("", changes), raw, steps, splits, folder / f"{len(known):02d}")
        return known[key]

    def effect(one: Changes, other: Changes) -> Effect:
        a, b = outcome(one), outcome(other)
        points = 100 * (b.metrics.get("test/acc", 0.0) - a.metrics.get("test/acc", 0.0))
        pair = Pair(Side("", a.run), Side("", b.run))
        return Effect(a.sha256 == b.sha256, pair.largest("weights", pair.length), points)

    rows = []
    lines = ["| what differs | other bits | weights | accuracy, points | removed by | what is then left |"]
    lines.append("|---|---|---|---|---|---|")
    for pair in with_counter(pairs(config, raw["model"]), "pair"):
        observed, left = effect(pair.one, pair.other), effect(*pair.switched) if pair.switched else None
        rows.append({"pair": pair.name, "effect": asdict(observed), "left": asdict(left) if left else None})
        numbers = f"{'no' if observed.same_bits else 'yes'} | {observed.weights:.0e} | {observed.accuracy:+.2f}"
        lines.append(f"| {pair.name} | {numbers} | {pair.switch} | {left or '-'} |")
    return rows, "\n".join(lines)
