"""What legitimately differs between two runs, how much, and the switch that removes it, as a table for docs/parity.md:

    python scripts/differences.py data=mnist
    python scripts/differences.py data=mnist 'nets=[resnet18]' steps=10 batch_size=32 test_samples=200

Each line is a pair of runs that differ in one thing, compared in bits, weights and test accuracy; and where there is a
switch, the same pair with it. Another seed stands at the end, for scale. Kinds of GPU round differently as well; that
takes two of them, and is not measured.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from omegaconf import OmegaConf
from torch.utils.data import Subset
from trials.distance import difference
from trials.trial import Outcome, Trial, counted, prepare, run

from lockstep.arithmetic.layout import Refusal
from lockstep.loading import open_data
from lockstep.run import cli
from lockstep.run.checks import ROOT, several, text, whole
from lockstep.run.config import check
from lockstep.run.summary import versions, write_summary

PIECES = 4  # a step of the reference
ONE: dict[str, Any] = {
    "strategy": {"name": "auto"},
    "devices": 1,
    "pieces": PIECES,
    "accumulate_grad_batches": None,
    "exact": True,
    "threads": 1,
    "precision": "32-true",
}
TWO = ONE | {"strategy": {"name": "ddp"}, "devices": 2}
DEFAULT, HALVES = {"exact": False}, {"pieces": PIECES // 2}


@dataclass(frozen=True)
class Pair:
    """Two configs that differ in one thing, and again with the switch that removes it."""

    name: str
    one: dict[str, Any]
    other: dict[str, Any]
    switch: str = ""
    switched: tuple[dict[str, Any], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Effect:
    """How two runs differ: relative weights (norms, the largest of all tensors), test accuracy in points."""

    same_bits: bool
    weights: float
    accuracy: float

    def __str__(self) -> str:
        if self.same_bits:
            return "same bits"
        return f"{self.weights:.0e}, {self.accuracy:+.2f}"


def model(net: str) -> dict[str, Any]:
    """The model of a net's name: a file of conf/model, `+dropout` with a quarter of the hidden units dropped."""
    name, _, extra = net.partition("+")
    path = ROOT / "conf" / "model" / f"{name}.yaml"
    if not path.exists() or extra not in ("", "dropout"):
        raise Refusal(f"nets: {net} is neither a file in conf/model nor one with +dropout")
    found: Any = OmegaConf.to_container(OmegaConf.load(path))
    return found | ({"dropout": 0.25} if extra else {})


def pairs(net: str, seed: int) -> list[Pair]:
    """What is compared for a net; all keys not named are the same."""
    made = model(net)
    one, two = ONE | {"model": made}, TWO | {"model": made}
    cut = Pair("another number of pieces (4, 2)", one, one | HALVES)
    if "norm" in made:
        group = one | {"model": made | {"norm": "group"}}
        cut = replace(cut, name=f"{cut.name}, BatchNorm", switch="`model.norm=group`", switched=(group, group | HALVES))
    elif made.get("dropout"):
        without = one | {"model": made | {"dropout": 0.0}}
        cut = replace(
            cut, name=f"{cut.name}, dropout", switch="`model.dropout=0`", switched=(without, without | HALVES)
        )
    return [
        Pair("order of summation (1 device, ddp on 2)", one | DEFAULT, two | DEFAULT, "`exact=true`", (one, two)),
        cut,
        Pair("`precision=bf16-mixed`", one, one | {"precision": "bf16-mixed"}, "`precision=32-true`"),
        Pair("2 CPU threads in a worker", one, one | {"threads": 2}, "`threads=1`, as `exact=true` sets", (one, two)),
        Pair("for scale: another seed", one, one | {"seed": seed + 1}),
    ]


def differences(raw: dict[str, Any], folder: Path) -> None:
    """Runs all pairs, prints the table, writes it with its numbers."""
    nets = several(text)("nets", raw.pop("nets"))
    steps, test_samples = (whole(1)(key, raw.pop(key)) for key in ("steps", "test_samples"))
    config = check({**raw, **ONE})
    plan = [(net, pair) for net in nets for pair in pairs(net, config.seed)]
    splits = open_data(config.data, config.data_dir, config.seed)
    splits = replace(splits, val=None, test=Subset(splits.test, range(min(test_samples, len(splits.test)))))
    known: dict[str, Outcome] = {}

    def outcome(changes: dict[str, Any]) -> Outcome:
        key = repr(sorted(changes.items()))
        if key not in known:
            known[key] = run(Trial("", changes), prepare(raw, steps), splits, folder / "trials" / f"{len(known):02d}")
        return known[key]

    def effect(one: dict[str, Any], other: dict[str, Any]) -> Effect:
        a, b = outcome(one), outcome(other)
        points = 100 * (b.metrics["test/acc"] - a.metrics["test/acc"])
        return Effect(a.sha256 == b.sha256, difference(b.weights, a.weights), points)

    lines = [
        "| network | what differs | other bits | weights | accuracy, points | removed by | what is then left |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = []
    for net, pair in counted(plan, "pair"):
        found = effect(pair.one, pair.other)
        left = effect(*pair.switched) if pair.switched else None
        rows.append({"net": net, "pair": pair.name, "effect": asdict(found), "left": asdict(left) if left else None})
        other_bits = "no" if found.same_bits else "yes"
        lines.append(
            f"| {net} | {pair.name} | {other_bits} | {found.weights:.0e} | {found.accuracy:+.2f} "
            f"| {pair.switch or '-'} | {left or '-'} |"
        )
    table = "\n".join(lines)
    print(table)
    (folder / "differences.md").write_text(table + "\n")
    report = {"config": raw, "steps": steps, "test_samples": len(splits.test), "rows": rows, "versions": versions()}
    write_summary(folder / "differences.json", report)


if __name__ == "__main__":
    cli.command(differences, "differences")
