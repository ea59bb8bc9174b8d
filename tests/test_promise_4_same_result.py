"""Promise 4 on whole runs: the same `batch_size` and `pieces` give the same weights and buffers on every layout.

Each table is one sweep in one process, since a process costs seconds of imports and a further job one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, Run, summary_of

pytestmark = pytest.mark.slow

BARE = ("callbacks.console=null", "callbacks.dashboard=null", "logger=none", "threads=1")
# 312 samples are 3 steps of 96 and a tail of 24: two of those are among the 9 steps
SMALL = ("data=synthetic", "data.samples=312", "data.image_size=12", "data.val_fraction=0")
CNN = (*BARE, *SMALL, "batch_size=96", "max_steps=9", "max_epochs=9")
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
LAYOUTS = {(s, d) for s in ("dp", "ddp") for d in (1, 2, 3)}

State = dict[str, torch.Tensor]
Key = tuple[Any, ...]


def distance(a: State, b: State) -> dict[str, float]:
    """||a - b|| / ||b|| over all weights, and over all buffers (0 where there are none)."""
    found = {}
    for kind in ("weights", "buffers"):
        names = [name for name in b if (kind == "buffers") == name.endswith(BUFFERS)]
        nothing = [torch.zeros(1, dtype=torch.float64)]
        ours, theirs = (torch.cat([s[n].double().flatten() for n in names] or nothing) for s in (a, b))
        found[kind] = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-300))
    assert a.keys() == b.keys()
    return found


def weights(run: Run, *axes: str) -> dict[Key, State]:
    """The final state of each job, by what `axes` of its config say. Frees the disk: ResNets are large."""
    found: dict[Key, State] = {}
    for job in run.jobs:
        saved = torch.load(job / "checkpoints" / "last.ckpt", weights_only=True)
        values = saved["lockstep"]["config"]
        key = tuple(values[axis]["name"] if isinstance(values[axis], dict) else values[axis] for axis in axes)
        assert saved["global_step"] == summary_of(job)["steps"] == values["max_steps"]
        found[key] = saved["state_dict"]
        shutil.rmtree(job / "checkpoints")
    assert len(found) == len(run.jobs)
    return found


def farthest(states: Iterable[State], reference: State) -> dict[str, float]:
    distances = [distance(state, reference) for state in states]
    return {kind: max(d[kind] for d in distances) for kind in ("weights", "buffers")}


def sweep(folder: Path, *overrides: str) -> Run:
    return Program(folder / "outputs")(*overrides, "-m", timeout=600)


def test_every_layout_takes_the_same_steps_with_dropout(tmp_path: Path) -> None:
    run = sweep(
        tmp_path, *CNN, "model.dropout=0.5", "pieces=6", "precision=64-true", "strategy=dp,ddp", "devices=1,2,3"
    )  # fmt: skip
    states = weights(run, "strategy", "devices")
    assert states.keys() == LAYOUTS
    assert farthest(states.values(), states["ddp", 1])["weights"] <= 1e-10


def test_without_dropout_pieces_are_rounding(tmp_path: Path) -> None:
    run = sweep(tmp_path, *CNN, "precision=64-true", "pieces=3,12", "strategy=dp,ddp", "devices=3")
    states = weights(run, "pieces", "strategy", "devices")
    assert {key[0] for key in states} == {3, 12}
    assert farthest(states.values(), states[3, "ddp", 3])["weights"] <= 1e-10


def test_batchnorm_sees_its_piece_on_every_layout(tmp_path: Path) -> None:
    run = sweep(
        tmp_path, *BARE, *SMALL, "data.samples=18", "data.image_size=16", "model=resnet18",
        "optimizer.momentum=0", "optimizer.nesterov=false", "precision=64-true", "batch_size=12", "pieces=6",
        "max_steps=2", "max_epochs=9", "strategy=dp,ddp", "devices=1,3",
    )  # fmt: skip
    states = weights(run, "strategy", "devices")
    found = farthest(states.values(), states["ddp", 1])
    assert found["weights"] <= 1e-10
    assert found["buffers"] <= 1e-10
    assert any(name.endswith("running_var") for name in states["ddp", 1])


def test_what_is_not_the_same_run_is_told_apart(tmp_path: Path) -> None:
    """The controls: 1% more learning rate, and with dropout another number of pieces."""
    run = sweep(tmp_path, *CNN, "model.dropout=0.5", "precision=64-true", "pieces=6,12", "lr=0.05,0.0505")
    states = weights(run, "pieces", "lr")
    for other in ((6, 0.0505), (12, 0.05)):
        assert distance(states[other], states[6, 0.05])["weights"] > 1e-4, other
