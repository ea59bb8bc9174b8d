"""The advice: the model that it predicts with, and a whole answer on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from advice.answer import conclusion
from advice.prediction import Choice, Machine, predict
from advise import advise
from conftest import ROOT, Program

from lockstep.arithmetic.layout import Refusal
from lockstep.run.config import check

LATENCY, BANDWIDTH = 2e-4, 1.5e9


def machine() -> Machine:
    """Two cores, on which a busy neighbour costs a third, and a turn's overhead is 5 ms; half a MiB of gradients."""
    sizes = [1 << bits for bits in range(10, 27, 2)]
    ring = [(size, LATENCY + size / BANDWIDTH) for size in sizes]  # 2 (N - 1) / N is 1 for two
    return Machine({1: {1: 0.105, 8: 0.140}, 2: {1: 0.072, 4: 0.087}}, {8: 10.0, 64: 52.0}, {1: [], 2: ring}, 1 << 19)


def choices(**changes: Any) -> dict[str, Choice]:
    raw = {
        "name": "x", "outputs": "o", "data": {}, "data_dir": "d", "num_workers": None, "strategy": {"name": "auto"},
        "accelerator": "cpu", "devices": 1, "num_nodes": 1, "rdzv_endpoint": None, "batch_size": 64, "exact": False,
        "precision": "32-true", "threads": None, "memory_format": "auto",
    }  # fmt: skip
    offered = [(n, a) for n in (1, 2) for a in (1, 2, 4)]
    return {str(choice): choice for choice in predict(64, offered, check(raw | changes), machine())}


def test_the_ring_is_found_in_its_times() -> None:
    assert machine().ring(2) == pytest.approx((LATENCY, BANDWIDTH), rel=1e-6)
    assert machine().send(2) == pytest.approx(LATENCY + (1 << 19) / BANDWIDTH)


def test_predictions_add_up() -> None:
    found = choices()
    assert len(found) == 9
    one = found["strategy=auto devices=1 accumulate_grad_batches=2"]
    assert one.predicted == pytest.approx(0.110)
    ddp = found["strategy=ddp devices=2 accumulate_grad_batches=2"]
    assert ddp.predicted == pytest.approx(0.077 + LATENCY + (1 << 19) / BANDWIDTH)
    dp = found["strategy=dp devices=2 accumulate_grad_batches=2"]  # one process computes the four pieces
    assert dp.predicted == pytest.approx(0.120)
    assert ddp.mib == pytest.approx(10 + 42 * 8 / 56)


def test_what_does_not_fit_is_not_offered() -> None:
    assert set(choices()) - set(choices(memory_budget=20)) == {
        "strategy=auto devices=1 accumulate_grad_batches=1",
        "strategy=auto devices=1 accumulate_grad_batches=2",
        "strategy=ddp devices=2 accumulate_grad_batches=1",
        "strategy=dp devices=2 accumulate_grad_batches=1",
    }


def test_measured_is_compared_with_measured() -> None:
    found = choices()
    ddp, one = (found[f"strategy={name} accumulate_grad_batches=1"] for name in ("ddp devices=2", "auto devices=1"))
    ddp.measured = 0.1
    asked: Any = SimpleNamespace(batch_size=64, layout=SimpleNamespace(accelerator="cpu"))
    without: Any = [choice for choice in found.values() if choice.devices > 1]  # one device does not hold it
    assert "than one device" not in conclusion(without, machine(), asked)
    one.measured = 0.25
    said = conclusion([*found.values()], machine(), asked)
    assert "2.50 times as fast as one device (250.0 ms, measured)" in said
    assert "dp is one process" in said
    assert "110.0 ms at best (predicted)" in said


def test_what_to_verify_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="verify=two: must be a whole number of at least 1"):
        advise({"verify": "two"}, tmp_path)


TINY = ("data=synthetic", "data.samples=200", "data.image_size=12", "data.num_classes=3", "accelerator=cpu")


def asked(folder: Path, *overrides: str) -> tuple[str, dict[str, Any]]:
    run = Program(folder, "scripts/advise.py")(*TINY, "seconds=0.2", *overrides, cwd=ROOT)
    return run.stdout, json.loads((run.folder / "advise.json").read_text())


def test_an_answer_rests_on_what_was_run(tmp_path: Path) -> None:
    said, report = asked(tmp_path, "batch_size=64", "verify=1")
    run = [choice for choice in report["choices"] if choice["measured"]]
    assert run[0] == report["choices"][0]
    ones = [choice for choice in report["choices"] if choice["devices"] == 1]
    assert ones[0]["measured"], "what the answer compares with"
    assert len(run) == 1 + (run[0] is not ones[0])
    best = min(run, key=lambda choice: choice["measured"])
    assert report["answer"] in said
    assert f"devices={best['devices']} accumulate_grad_batches={best['accumulate_grad_batches']}" in report["answer"]
    for choice in report["choices"]:
        assert choice["predicted"] == pytest.approx(choice["compute"] + choice["all_reduce"])
        assert choice["mib"] > 0
    assert all(choice["error"] == pytest.approx(choice["predicted"] / choice["measured"] - 1) for choice in run)
    assert "Predictions were off by" in report["answer"]


@pytest.mark.slow
def test_every_layout_can_be_run(tmp_path: Path) -> None:
    said, report = asked(tmp_path, "batch_size=64", "verify=all")
    assert len(report["choices"]) >= 6
    assert all(choice["measured"] > 0 for choice in report["choices"])
    assert {choice["strategy"] for choice in report["choices"]} == {"single", "ddp", "dp"}
    assert said.count("%") > len(report["choices"])
