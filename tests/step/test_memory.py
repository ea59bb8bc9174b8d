"""Out of memory ends a run in one line, and a script finds how many micro-batches fit."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Program

from lockstep.arithmetic.layout import resolve
from lockstep.errors import UserError
from lockstep.programs import fit_memory
from lockstep.step.memory import optimizer_memory_advice, out_of_memory, out_of_memory_advice

TASK = (
    "data=synthetic", "data.samples=300", "data.image_size=48", "data.num_classes=3", "batch_size=256", "max_epochs=1",
    "accelerator=cpu", "precision=64-true", "logger=none", "threads=1", "strategy=ddp", "devices=2",
)  # fmt: skip


def test_one_rank_without_memory_ends_the_run_in_one_line(project: Path, tmp_path: Path) -> None:
    """It has taken a step, so what it logged stays."""
    run = Program(tmp_path, home=project)(*TASK, "model._target_=mine.OutOfMemory", "batch_size=64", ok=False)
    assert run.returncode == 2, str(run)
    output = (
        r"^error: step 2: out of memory in 2 pieces of 32 samples with strategy=ddp: "
        r"pieces=4 \(accumulate_grad_batches=2\) takes less$"
    )
    assert re.search(output, run.stderr, re.M), run.stderr
    assert "Traceback" not in run.stderr
    assert (run.summary["status"], run.summary["steps"]) == ("failed", 1)
    assert f"error: {run.summary['error']}\n" in run.stderr


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_a_script_finds_how_many_micro_batches_fit(tmp_path: Path) -> None:
    """Pieces of 12 samples, and of 6, take too much; those of 3 fit."""
    fit = Program(tmp_path, "lockstep fit-memory")
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}
    task = ("data=synthetic", "data.samples=60", "batch_size=12", "accelerator=cpu", "logger=none", "threads=1")
    actual = fit(*task, "model._target_=user_modules.Hungry", env=path)
    assert actual.stdout == "accumulate_grad_batches=4\n", actual
    tried = re.findall(r"^accumulate_grad_batches=(\d+) does not fit: .*out of memory in", actual.stderr, re.M)
    assert tried == ["1", "2"], actual.stderr
    other = fit(*task, "model._target_=user_modules.WrongShapes", env=path, ok=False)
    assert (other.returncode, other.stdout) == (1, ""), other
    assert re.search(r"^error: .*RuntimeError: shapes cannot be multiplied", other.stderr, re.M), other.stderr
    assert list(tmp_path.iterdir()) == [], "what was tried leaves nothing"


def test_what_an_error_reports_of_memory() -> None:
    layout = resolve(strategy="ddp", accelerator="cpu", devices=2, num_nodes=1, batch_size=6)
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        torch.empty(1 << 60)
    assert out_of_memory_advice(error.value, 11, layout) == (
        "step 12: out of memory in 2 pieces of 3 samples with strategy=ddp: pieces=6 (accumulate_grad_batches=3) "
        "takes less"
    )
    finest = resolve(strategy="ddp", accelerator="cpu", devices=2, num_nodes=1, batch_size=2)
    assert str(out_of_memory_advice(error.value, 11, finest)).endswith(
        "2 pieces of 1 sample with strategy=ddp: use a smaller batch_size, since 2 can't be cut finer"
    )
    assert str(out_of_memory_advice(error.value, 11, finest, "strategy=fsdp")).endswith(
        "since 2 can't be cut finer, or strategy=fsdp"
    )
    assert optimizer_memory_advice(error.value, 11, layout, "strategy=fsdp") == (
        "step 12: out of memory in the optimizer with strategy=ddp: use an optimizer with less state, since pieces do "
        "not change it, or strategy=fsdp"
    )
    assert optimizer_memory_advice(RuntimeError("shapes cannot be multiplied"), 11, layout) is None
    assert out_of_memory_advice(RuntimeError("shapes cannot be multiplied"), 11, layout) is None
    refusal = UserError("step 12")
    refusal.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert out_of_memory(refusal)


def test_what_the_messages_propose_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finer pieces; then a part of the weights on each device; then gathered weights that are freed, which fits."""
    tried: list[tuple[list[str], int]] = []
    lacking = "error: step 1: out of memory in 2 pieces of 1 sample with strategy=ddp"
    proposals = [
        "pieces=6 (accumulate_grad_batches=3) takes less",
        "use a smaller batch_size, since 6 can't be cut finer, or strategy=fsdp",
        "use an optimizer with less state, since pieces do not change it, or strategy.reshard=true",
        "pieces=6 (accumulate_grad_batches=3) takes less",
    ]

    def attempt(overrides: list[str], micro_batches: int) -> Any:
        tried.append((overrides, micro_batches))
        left = proposals[len(tried) - 1 :]
        return bool(left), f"a log\n{lacking}: {left[0]}\n" if left else ""

    monkeypatch.setattr(fit_memory, "attempt", attempt)
    assert fit_memory.main(["model=resnet18", "strategy=ddp", "devices=2"]) == 0
    assert capsys.readouterr().out == "strategy=fsdp strategy.reshard=true accumulate_grad_batches=3\n"
    rest, sharded = ["model=resnet18", "devices=2"], ["strategy=fsdp", "strategy.reshard=true"]
    first = ["model=resnet18", "strategy=ddp", "devices=2"]
    assert tried == [(first, 1), (first, 3), ([*rest, sharded[0]], 1), (rest + sharded, 1), (rest + sharded, 3)]
    proposals.append("use a smaller batch_size, since 6 can't be cut finer")
    tried.clear()
    assert fit_memory.main(["model=resnet18"]) == 1
