"""The GPU's benchmark as far as a machine without one can run it: its sides, its figures, what it counts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT
from parts import gpu
from parts.players import OPPONENTS, Outcome

from lockstep.run import config
from lockstep.run.config import check, gpu_count
from lockstep.run.library import compose

TINY = replace(
    gpu.GPU_CASES[0], batch=16, data=gpu.SMALL | {"samples": 600}, steps=4, rounds=1, apart=(1e-3, 0.5), save_at=2
)


def test_only_waits_count_and_events_are_told() -> None:
    kinds = ["cudaStreamSynchronize", "cudaEventSynchronize", "Memcpy HtoD (Pageable -> Device)"]
    found = gpu.waits("x", dict.fromkeys([*kinds, "Memcpy HtoD (Pinned -> Device)", "cudaLaunchKernel"], 0.5))
    assert (found.ours, found.met) == (0.5, False)
    assert found.check == ", ".join(f"{kind} 0.5" for kind in sorted(kinds))


def test_every_side_is_one_that_train_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "gpu_count", lambda: 1)
    monkeypatch.setattr("lockstep.run.config.lacking", lambda accelerator: None)  # a compiler, say
    for case in gpu.GPU_CASES:
        for options in gpu.OURS.values():
            asked = check(compose(f"model={case.model}", f"batch_size={case.batch}", *gpu.BARE_TRAINING, *options))
            assert asked.layout.accelerator == "gpu"
        assert int(0.9 * case.data["samples"]) % case.batch == 0  # else the tail would be compiled too
        assert 0.9 * case.data["samples"] / case.batch > (case.rounds + 1) * case.steps  # an epoch's end saves


def test_rows_say_how_much_faster_an_option_is(tmp_path: Path) -> None:
    sides = [*gpu.OURS, *gpu.BARE]
    found = {side: Outcome(tmp_path, [98.0 + number] * 3) for number, side in enumerate(sides)}
    case = gpu.GPU_CASES[2]
    lines = {line.what.partition(": ")[2]: line for line in gpu.rows(case, found, dict.fromkeys(sides, 0.0))}
    assert (case.model, case.batch, case.steps) == ("resnet18", 128, 100)
    assert lines["compile=true against the defaults"].ratio == pytest.approx(100 / 98)
    tuned = lines["tuned, times as fast as the bare loop"]
    seconds = [98.0 + sides.index(side) for side in ("ours, tuned", "bare, tuned")]
    assert (tuned.ours, tuned.other) == pytest.approx([128 * 98 / block for block in seconds])
    assert (tuned.goal, tuned.met) == (0.97, True)


def test_a_gpu_is_waited_for_where_counting_begins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(OPPONENTS))
    import turns

    (go, goes), (heard, tells) = os.pipe(), os.pipe()
    os.write(goes, b"...")
    monkeypatch.setenv("TURNS", f"{go},{tells},5,2")
    waits: list[int] = []
    player = turns.Turns()
    monkeypatch.setattr(turns, "wait_for_gpu", lambda: waits.append(len(player.seconds) + 1))
    player.begin()
    for _ in range(10):
        player.step([])
    assert waits == [2, 5] * 2
    for end in (go, goes, heard, tells):
        os.close(end)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile with")
def test_a_case_runs_whole_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    ours = {"ours": (), "compile=true": ("compile=true",), "ours, tuned": (gpu.BF16, "compile=true")}
    kept = ("plain", "plain again", "levers", "bare, tuned")
    lines = gpu.measure(TINY, tmp_path, "cpu", ours, {side: gpu.BARE[side] for side in kept})
    assert [line.what.partition(": ")[2] for line in lines] == [
        "control, plain against plain",
        "against the plain loop",
        "against the loop with every lever",
        "compile=true against the defaults",
        "tuned, times as fast as the bare loop",
    ]
    assert all(line.ours > 0 and line.other > 0 for line in lines)
    waits = gpu.synchronisations(TINY, tmp_path, "accelerator=cpu")
    assert (waits.ours, waits.met, waits.check) == (0, True, "none of any kind")


@pytest.mark.skipif("gpu_count() > 0", reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "scripts/bench/benchmark.py", "gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: gpu: this machine has no GPU that torch can use\n")
    assert gpu_count() == 0
