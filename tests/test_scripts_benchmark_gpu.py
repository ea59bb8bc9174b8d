"""The GPU's benchmark as far as a machine without one can run it: its sides, its figures, what it counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import gpu
from parts.players import OPPONENTS
from parts.steps import race

from lockstep.run import config
from lockstep.run.config import check
from lockstep.run.library import compose

TINY = replace(
    gpu.GPU_CASES[0], batch=16, data=gpu.SMALL | {"samples": 600}, steps=4, rounds=1, limits=(1e-3, 0.5), save_at=2
)


def test_every_side_is_one_that_train_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "gpu_count", lambda: 1)
    monkeypatch.setattr("lockstep.run.config.lacking", lambda accelerator: None)  # a compiler, say
    for case in gpu.GPU_CASES:
        for options in gpu.OURS.values():
            asked = check(compose(f"model={case.model}", f"batch_size={case.batch}", *gpu.BARE_TRAINING, *options))
            assert asked.layout.accelerator == "gpu"
        assert int(0.9 * case.data["samples"]) % case.batch == 0  # else the tail would be compiled too
        assert 0.9 * case.data["samples"] / case.batch > (case.rounds + 1) * case.steps  # an epoch's end saves


@pytest.mark.slow
@pytest.mark.usefixtures("forked_commands")
def test_a_case_runs_whole_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sides make the same steps, else it fails: as it does with one that takes another order."""
    monkeypatch.setattr(gpu, "BARE", {side: gpu.BARE[side] for side in ("plain", "levers")})  # bf16 may be emulated
    lines = gpu.measure(TINY, tmp_path, "cpu", {"ours": ()})
    assert [line.what.partition(": ")[2] for line in lines] == [
        "against the plain loop",
        "against the loop with every lever",
    ]
    assert all(line.ours > 0 and line.other > 0 for line in lines)

    task, wrong = tmp_path / "mnist_cnn.task.pt", tmp_path / "wrong.pt"
    told: dict[str, Any] = torch.load(task)
    torch.save(told | {"order": told["order"][::-1]}, wrong)
    sides = {
        side: [[str(OPPONENTS / "bare_loop.py"), "--task", str(path)]]
        for side, path in (("plain", task), ("wrong", wrong))
    }
    with pytest.raises(RuntimeError, match=r"the weights of 'wrong' are \d\d"):
        race(replace(TINY, rounds=0), sides, tmp_path, {"wrong": ("plain", TINY.limits[0])}, task)
