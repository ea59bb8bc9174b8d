"""accumulate_grad_batches=auto finds how many pieces fit; out of memory in mid-run ends in one line."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Program, apart

from lockstep.arithmetic.layout import resolve
from lockstep.errors import UserError
from lockstep.step.memory import advice, out_of_memory

TASK = (
    "data=synthetic", "data.samples=300", "data.image_size=48", "data.num_classes=3", "batch_size=256", "max_epochs=1",
    "accelerator=cpu", "precision=64-true", "logger=none", "threads=1", "strategy=ddp", "devices=2",
)  # fmt: skip
AUTO = "accumulate_grad_batches=auto"
BUDGET = "memory_budget=250"  # a worker takes 500 for its part in one piece, 75 to 120 for weights and libraries


def test_a_budget_finds_how_many_fit_and_the_weights_stay(project: Path, tmp_path: Path) -> None:
    task, script = (*TASK, "model=mine", "model._target_=mine.Large", AUTO), str(project / "src" / "train.py")
    free = Program(tmp_path / "free", script)(*task, cwd=project)  # nothing limits it
    assert free.summary["layout"]["pieces"] == 2
    train = Program(tmp_path / "limited", script)
    run = train(*task, BUDGET, cwd=project)
    layout = run.summary["layout"]
    assert layout["batch_size"] == 256
    assert 2 < layout["pieces"] < 256
    tried = [int(number) for number in re.findall(r"^accumulate_grad_batches=(\d+): out of memory$", run.stderr, re.M)]
    assert tried == [1 << bit for bit in range(len(tried))]
    assert f"accumulate_grad_batches={2 * tried[-1]} fits" in run.stderr
    assert layout["pieces"] == 4 * tried[-1]
    assert apart(run, free) < 1e-10
    # it goes on with the number that it has found, whatever fits now
    resumed = train(f"resume={run.folder}", "max_epochs=2", "memory_budget=null", cwd=project)
    assert resumed.summary["layout"]["pieces"] == layout["pieces"]
    assert apart(resumed, free) > 1e-3  # the control: weights that differ do


def test_one_rank_without_memory_ends_the_run_in_one_line(project: Path, tmp_path: Path) -> None:
    train = Program(tmp_path, str(project / "src" / "train.py"))
    run = train(*TASK, "model._target_=mine.OutOfMemory", "batch_size=64", cwd=project, ok=False)
    assert run.returncode == 2, str(run)
    said = (
        r"^error: step 2: out of memory in 2 pieces of 32 samples; pieces=4 \(accumulate_grad_batches=2\) takes less$"
    )
    assert re.search(said, run.stderr, re.M), run.stderr
    assert "Traceback" not in run.stderr


def test_another_error_is_no_lack_of_memory(project: Path, tmp_path: Path) -> None:
    train = Program(tmp_path, str(project / "src" / "train.py"))
    run = train(*TASK, "model._target_=mine.WrongShapes", AUTO, BUDGET, cwd=project, ok=False)
    assert run.returncode == 1, str(run)
    assert re.search(r"^error: rank \d failed: RuntimeError: shapes cannot be multiplied", run.stderr, re.M)
    assert "out of memory" not in run.stderr


def test_a_budget_that_nothing_asks_for_is_refused(tmp_path: Path) -> None:
    run = Program(tmp_path)(*TASK, BUDGET, ok=False)
    assert run.returncode == 2, str(run)
    assert f"error: {BUDGET}: on a CPU it limits what {AUTO} tries; give that too" in run.stderr


def test_what_an_error_says_of_memory() -> None:
    layout = resolve(strategy="ddp", accelerator="cpu", devices=2, num_nodes=1, batch_size=6)
    step: Any = SimpleNamespace(step=11)
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        torch.empty(1 << 60)
    assert advice(error.value, step, layout) == (
        "step 12: out of memory in 2 pieces of 3 samples; pieces=6 (accumulate_grad_batches=3) takes less"
    )
    finest = resolve(strategy="ddp", accelerator="cpu", devices=2, num_nodes=1, batch_size=2)
    assert str(advice(error.value, step, finest)).endswith("2 pieces of 1 sample; the batch_size can't be cut finer")
    assert advice(RuntimeError("shapes cannot be multiplied"), step, layout) is None
    refusal = UserError("step 12")
    refusal.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert out_of_memory(refusal)
