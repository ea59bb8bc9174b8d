"""What only a GPU can show: run these first where there is one. Everything else about it is tested on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import RANDOM, Program, apart
from parts import gpu

from lockstep.launch.machine import gpu_count

pytestmark = pytest.mark.skipif(gpu_count() == 0, reason="there is no GPU")

TASK = (
    *RANDOM,
    *("accelerator=gpu", "data.samples=600", "batch_size=128", "pieces=4", "model.dropout=0.3"),  # 4 steps and a tail
    *("callbacks=default", "callbacks.console=null", "callbacks.dashboard=null"),
)


def test_resident_data_moves_no_bit(tmp_path: Path) -> None:
    found = [Program(tmp_path / choice)(*TASK, "exact=true", f"resident={choice}") for choice in ("true", "false")]
    assert found[0].summary["weights_sha256"] == found[1].summary["weights_sha256"]


@pytest.mark.parametrize("mode", ["true", "reduce-overhead"])
@pytest.mark.parametrize("pieces", [1, 4])
def test_compiled_and_as_cuda_graphs_weights_agree(tmp_path: Path, mode: str, pieces: int) -> None:
    task = (*TASK, f"pieces={pieces}", "precision=64-true", "optimizer=sgd")
    plain, other = (Program(tmp_path / name)(*task, f"compile={name}") for name in ("false", mode))
    assert apart(other, plain) < 1e-10


@pytest.mark.parametrize("more", [(), ("pieces=4",), ("compile=reduce-overhead", gpu.BF16)])
def test_a_step_waits_for_nothing(tmp_path: Path, more: tuple[str, ...]) -> None:
    case = replace(gpu.GPU_CASES[0], data=gpu.SMALL)  # 18,000 images: 140 steps without an epoch's end
    found = gpu.synchronisations(case, tmp_path, "accelerator=gpu", *more)
    assert found.met, found.check
