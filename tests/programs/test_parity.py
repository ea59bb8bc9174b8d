"""lockstep parity: it passes what is the same, and fails where it can't see what is wrong."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import STRATEGIES, Program, Run, composed
from torch import nn

from lockstep.config.check import check
from lockstep.config.instantiate import locate
from lockstep.config.pages import group_file
from lockstep.data import Splits
from lockstep.programs.parity import layouts, verdict
from lockstep.programs.trials.faults import Fault
from lockstep.programs.trials.judging import Row
from lockstep.programs.trials.trial import shorten

TINY = (
    "data=synthetic",
    "data.samples=60",
    "data.image_size=12",
    "data.num_classes=3",
    "batch_size=16",
    "accelerator=cpu",
    "devices=2",
    "accumulate_grad_batches=1",
    "steps=4",
    "test_samples=11",
)


@pytest.fixture
def run_parity(tmp_path: Path) -> Program:
    return Program(tmp_path / "outputs", "lockstep parity")


def report(run: Run) -> dict[str, Any]:
    actual: dict[str, Any] = json.loads((run.folder / "parity.json").read_text())
    return actual


@pytest.mark.usefixtures("processes")
def test_layouts_pass_and_controls_are_seen(run_parity: Program) -> None:
    run = run_parity(*TINY, "model.dropout=0.2")
    rows = report(run)["rows"]
    assert all(row["passed"] for row in rows)
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in ("default", "exact", "pieces", "control")}
    targets = {name: group_file("strategy", name)["_target_"] for name in STRATEGIES.split(",")[2:]}
    others = [
        f"{name}, 2 {'stages' if locate('strategy', each).weights == 'staged' else 'devices'}"
        for name, each in targets.items()
    ]
    layouts = ["1 device", "ddp, 2 devices", "dp, 2 devices", *others, "an engine's workers, 2"]
    assert [row["layout"] for row in by_kind["default"]] == [row["layout"] for row in by_kind["exact"]] == layouts
    assert [row["verdict"] for row in by_kind["exact"][1:]] == ["same bits"] * (len(layouts) - 1)
    assert by_kind["pieces"][0]["verdict"] == "legal: dropout, other pieces"
    assert len(by_kind["control"]) == 4
    assert all(row["verdict"].startswith("seen") for row in by_kind["control"])
    assert {row["evaluated"].partition("/")[2] for row in rows} == {"11"}
    assert (run.folder / "parity.png").stat().st_size > 10_000
    assert run.stdout.endswith(
        f"The layouts agree: all {2 * len(layouts) + 1} rows are as promised, {len(layouts)} of them bit for bit; "
        "all 4 mistakes made on purpose are seen.\n"
    )
    assert not list(run.folder.rglob("*.jsonl"))


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_rounding_that_adamw_makes_whole_steps_of_is_no_difference(run_parity: Program) -> None:
    """The true gradient of a bias before BatchNorm is zero, and AdamW takes a whole step along what rounding leaves."""
    net = (
        "model=fast_cnn",
        "model.width=[4,4,8,8]",
        "optimizer=adamw",
        "lr=0.003",
        "data.image_size=20",
        "data.samples=120",
    )
    rows = report(run_parity(*TINY, *net, "accumulate_grad_batches=2", "steps=6"))["rows"]
    assert [row["layout"] for row in rows if not row["passed"]] == []
    assert next(row["verdict"] for row in rows if row["kind"] == "pieces") == "legal: BatchNorm, other pieces"


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_a_comparison_that_sees_nothing_reports_it(run_parity: Program) -> None:
    run = run_parity(*TINY, "steps=2", "lr=1e-30", ok=False)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("error: all ")
    assert "this comparison does not see" in last
    assert "so it proves nothing: lr x 1.01" in last
    assert "NOT SEEN" in run.stdout


def test_the_layout_requested_is_compared_and_not_a_plain_one_in_its_place() -> None:
    overrides = ("strategy=ddp", "devices=2", "accumulate_grad_batches=2", "strategy.compression=bf16")
    raw = composed("accelerator=cpu", *overrides)
    actual = list(layouts(check(raw), raw))
    twos = [one["strategy"] for one in actual if one["devices"] == 2 and one["strategy"]["name"] == "ddp"]
    assert [strategy.get("compression") for strategy in twos] == ["bf16", "none"]  # the other one has uneven shares
    assert actual[1]["strategy"] == twos[0]


def test_the_verdict_names_the_rows_that_differ() -> None:
    rows = [Row("default", "1 device", "", "reference", True), Row("exact", "dp, 2 devices", "", "DIFFERENT", False)]
    rows += [Row("control", "lr x 1.01", "", "seen, from step 1", True)]
    expected = "1 of 2 rows differ: dp, 2 devices (exact); all 1 mistakes made on purpose are seen."
    assert verdict(rows) == (expected, False)
    rows[1] = Row("exact", "dp, 2 devices", "", "no exact sum", True)  # refused, which is legal
    expected = (
        "The layouts agree: all 2 rows are as promised, 0 of them bit for bit; all 1 mistakes made on purpose are seen."
    )
    assert verdict(rows) == (expected, True)


@pytest.mark.usefixtures("processes")
def test_a_length_of_training_is_refused(run_parity: Program) -> None:
    run = run_parity("devices=2", "max_steps=3", ok=False)
    assert run.returncode == 2, str(run)
    assert (
        run.stderr == "error: max_steps has no effect on lockstep parity: give steps=, the number of optimizer steps\n"
    )


@pytest.mark.usefixtures("processes")
def test_one_piece_is_refused(run_parity: Program) -> None:
    run = run_parity(*TINY, "devices=1", ok=False)
    assert run.returncode == 2
    assert "pieces=1" in run.stderr
    assert not run.folders


def test_few_training_samples_are_of_all_classes() -> None:
    labels = np.arange(1000) // 100  # by class, as class folders are
    balanced = Splits(labels.tolist(), None, None, labels=labels, weights=labels / 2)
    short: Any = shorten(balanced, batch_size=8, pieces=4, tail=None)
    assert len(short.train) % 8 == 2, "the short step"
    drawn = [short.train[number] for number in range(len(short.train))]
    assert set(drawn) == set(range(10))
    assert drawn == short.labels.tolist() == (2 * short.weights).tolist(), "by which samples are drawn"
    few: Any = shorten(Splits(labels[:9].tolist(), None, None), batch_size=8, pieces=4, tail=None)
    assert list(few.train.indices) == list(range(9))


def test_the_control_with_a_larger_lr_needs_no_argument_of_the_module() -> None:
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    fault, trainer = Fault(1, 8, "faster"), SimpleNamespace()
    rates = []
    for _ in range(2):
        before = module.weight.item()
        module.weight.grad = torch.ones(1, 1)
        fault.on_before_optimizer_step(trainer, module, optimizer)  # type: ignore[arg-type]
        optimizer.step()
        rates.append(before - module.weight.item())
    assert rates == pytest.approx([1.01, 1.01])
    assert optimizer.param_groups[0]["lr"] == 1.0
