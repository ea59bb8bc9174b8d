"""Optimizers and schedules: what decays, closed forms, refusals."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, Run, apart
from small_models import mnist_cnn, resnet18
from torch import nn

from lockstep.arithmetic.layout import Refusal
from project.models.optimizer import build_optimizer
from project.models.schedule import lr_factor


def test_biases_and_norms_do_not_decay() -> None:
    model = resnet18()
    model.net.fc.weight.requires_grad = False
    decay, plain = build_optimizer(model, 0.1, "adamw", weight_decay=0.02, betas=[0.8, 0.9]).param_groups
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.02, 0.0)
    assert all(p.ndim > 1 for p in decay["params"])
    assert all(p.ndim == 1 for p in plain["params"])
    assert len(decay["params"]) + len(plain["params"]) == len(list(model.parameters())) - 1, "all that is trained"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "lion"}, "sgd, adamw"),
        ({"name": "sgd", "beta": 1}, "beta"),
        ({"name": "sgd", "momentum": None}, "^optimizer.momentum=null: "),
        ({"name": "sgd", "weight_decay": None}, "^optimizer.weight_decay=null: "),
        ({"name": "adamw", "eps": -1.0}, "-1.0"),
        ({"name": "adamw", "betas": [0.9]}, "^optimizer.betas=.*two numbers"),
    ],
)
def test_bad_optimizers_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(Refusal, match=says):
        build_optimizer(nn.Linear(2, 2), 0.1, **options)


@pytest.mark.parametrize(
    ("total", "options", "says"),
    [
        (10, {"name": "step"}, "constant, cosine, onecycle"),
        (10, {"name": "cosine", "warmup_steps": 11}, r"warmup_steps=11 must lie in 0\.\.10"),
        (10, {"name": "cosine", "end": 1}, "end"),
        (10, {"name": "cosine", "final": 2}, "final=2"),
        (10, {"name": "onecycle", "peak": 1.0}, "peak=1.0"),
        (0, {"name": "constant"}, "total_steps=0"),
    ],
)
def test_bad_schedules_are_refused(total: int, options: dict[str, Any], says: str) -> None:
    with pytest.raises(Refusal, match=says):
        lr_factor(total, **options)


def test_schedules_are_their_closed_forms() -> None:
    constant = lr_factor(10, "constant", warmup_steps=4)
    assert [constant(s) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = lr_factor(104, "cosine", warmup_steps=4, final=0.1)
    assert cosine(0) == 0.25
    assert cosine(3) == cosine(4) == 1.0
    for step in range(4, 104):
        assert cosine(step) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4) / 100)) / 2)
    assert cosine(104) == cosine(200) == pytest.approx(0.1)
    onecycle = lr_factor(100, "onecycle", peak=0.2, start=0.1, final=0.0)
    assert [onecycle(s) for s in (0, 10, 20, 60, 100)] == pytest.approx([0.1, 0.55, 1.0, 0.5, 0.0])
    assert max(range(100), key=onecycle) == 20
    assert lr_factor(3, "cosine", warmup_steps=3)(2) == 1.0


@pytest.mark.parametrize("scheduler", [{"name": "cosine", "warmup_steps": 2}, {"name": "onecycle", "peak": 0.25}])
def test_schedule_resumes_from_plain_state(scheduler: dict[str, Any]) -> None:
    def run(setup: dict[str, Any], steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            rates.append(setup["optimizer"].param_groups[0]["lr"])
            setup["optimizer"].step()
            setup["lr_scheduler"]["scheduler"].step()
        return rates

    def build() -> Any:
        return mnist_cnn(scheduler=scheduler).configure_optimizers()

    whole = run(build(), 8)
    assert whole == pytest.approx([0.1 * lr_factor(8, **scheduler)(s) for s in range(8)])
    killed, resumed, file = build(), build(), io.BytesIO()
    first = run(killed, 3)
    torch.save([killed["optimizer"].state_dict(), killed["lr_scheduler"]["scheduler"].state_dict()], file)
    file.seek(0)
    optimizer, schedule = torch.load(file, weights_only=True)
    resumed["optimizer"].load_state_dict(optimizer)
    resumed["lr_scheduler"]["scheduler"].load_state_dict(schedule)
    assert first + run(resumed, 5) == whole


FUSED = ("+optimizer.fused=false", "+optimizer.fused=true")
TASK = (
    "data=synthetic",
    "data.samples=190",
    "batch_size=170",
    "precision=64-true",
    "callbacks.checkpoint.monitor=null",
)


def test_a_fused_optimizer_makes_the_same_steps_where_a_rank_has_no_sample(tmp_path: Path) -> None:
    """The last step has one; torch's fused kernel takes a gradient's memory for that of its parameter."""
    layout = ("strategy=ddp", "devices=2", "max_epochs=2")
    plain, fused = (Program(tmp_path / choice[-4:])(*TASK, *layout, choice) for choice in FUSED)
    assert apart(plain, fused) < 1e-12
    assert apart(plain, Program(tmp_path / "other")(*TASK, *layout, "seed=1")) > 1e-3


@pytest.mark.parametrize("strategy", ["auto", "dp"])
def test_a_fused_optimizer_goes_on_in_another_memory_format(tmp_path: Path, strategy: str) -> None:
    def train(choice: str) -> Run:
        first = Program(tmp_path / choice[-4:])(
            *TASK, f"strategy={strategy}", choice, "memory_format=contiguous", "max_steps=3"
        )
        return Program(tmp_path / choice[-4:])(
            f"resume={first.folder}", choice, "memory_format=channels_last", "max_steps=6"
        )

    plain, fused = map(train, FUSED)
    assert plain.summary["steps"] == fused.summary["steps"] == 6
    assert apart(plain, fused) < 1e-12
