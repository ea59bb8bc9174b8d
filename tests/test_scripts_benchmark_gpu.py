"""The GPU's benchmark as far as a machine without one can run it: its sides, its figures, what it counts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from parts import gpu
from parts.players import OPPONENTS
from parts.steps import race

from lockstep.run import config
from lockstep.run.config import check, gpu_count
from lockstep.run.library import compose

TINY = replace(
    gpu.GPU_CASES[0], batch=16, data=gpu.SMALL | {"samples": 600}, steps=4, rounds=1, limits=(1e-3, 0.5), save_at=2
)


def test_only_waits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["cudaStreamSynchronize", "cudaEventSynchronize", "Memcpy HtoD (Pinned -> Device)", "cudaLaunchKernel"]
    monkeypatch.setattr(gpu, "traced", lambda asked, folder: dict.fromkeys(kinds, 0.5))
    found = gpu.synchronisations(TINY, tmp_path)
    assert (found.ours, found.met) == (0.5, False)


def test_every_side_is_one_that_train_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "gpu_count", lambda: 1)
    monkeypatch.setattr("lockstep.run.config.lacking", lambda accelerator: None)  # a compiler, say
    for case in gpu.GPU_CASES:
        for options in gpu.OURS.values():
            asked = check(compose(f"model={case.model}", f"batch_size={case.batch}", *gpu.BARE_TRAINING, *options))
            assert asked.layout.accelerator == "gpu"
        assert int(0.9 * case.data["samples"]) % case.batch == 0  # else the tail would be compiled too
        assert 0.9 * case.data["samples"] / case.batch > (case.rounds + 1) * case.steps  # an epoch's end saves


def test_a_gpu_is_waited_for_where_counting_begins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(OPPONENTS))
    import turns

    ours, theirs = Pipe()
    for _ in range(3):
        ours.send("go")
    monkeypatch.setenv("TURNS", f"{os.dup(theirs.fileno())},5,2")
    waits: list[int] = []
    player = turns.Turns()
    monkeypatch.setattr(turns, "wait_for_gpu", lambda: waits.append(len(player.seconds) + 1))
    player.begin()
    for _ in range(10):
        player.step([])
    assert waits == [2, 5] * 2
    assert [len(ours.recv()) for _ in range(3)] == [0, 5, 5]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile with")
@pytest.mark.usefixtures("forked_commands")
def test_a_case_runs_whole_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sides make the same steps, else it fails: as it does with one that takes another order."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # each side takes its options; test_step_compile.py compiles
    monkeypatch.delitem(gpu.BARE, "plain again")
    lines = gpu.measure(TINY, tmp_path, "cpu", {"ours": (), "bf16, tuned": (gpu.BF16, "compile=true")})
    assert [line.what.partition(": ")[2] for line in lines] == [
        "against the plain loop",
        "against the loop with every lever",
        "tuned, against the tuned loop",
    ]
    assert all(line.ours > 0 and line.other > 0 for line in lines)
    waits = gpu.synchronisations(TINY, tmp_path, "accelerator=cpu")
    assert (waits.ours, waits.met) == (0, True)

    task, wrong = tmp_path / "mnist_cnn.task.pt", tmp_path / "wrong.pt"
    told: dict[str, Any] = torch.load(task)
    torch.save(told | {"order": told["order"][::-1]}, wrong)
    sides = {
        side: [[str(OPPONENTS / "bare_loop.py"), "--task", str(path)]]
        for side, path in (("plain", task), ("wrong", wrong))
    }
    with pytest.raises(RuntimeError, match=r"the weights of 'wrong' are \d\d"):
        race(replace(TINY, rounds=0), sides, tmp_path, {"wrong": ("plain", TINY.limits[0])}, task)


@pytest.mark.skipif("gpu_count() > 0", reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "scripts/bench/benchmark.py", "gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: gpu: this machine has no GPU that torch can use\n")
    assert gpu_count() == 0
