"""Optimizers and schedules: what decays, closed forms, what yaml and the command line can name, refusals."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, TINY, Program, Run, apart, composed, summary_of
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from kernels import Kernels
from lightning.pytorch.plugins.precision.amp import _optimizer_handles_unscaling
from small_data import small_resnet18
from torch import nn

from lockstep.config.arguments import experiment_keys
from lockstep.config.check import check
from lockstep.config.instantiate import instantiate, parameters
from lockstep.errors import UserError
from lockstep.job.optimizers import refuse_keys_without_effect, training_arguments, without_defaulted
from lockstep.launch import machine
from lockstep.vision import optimizers, schedules

SAMPLES = 640  # ten steps an epoch


def offered(*overrides: str) -> dict[str, Any]:
    """Return what a module gets to train with."""
    return training_arguments(check(dict(composed("max_epochs=2", *overrides))), SAMPLES)


def rates(made: dict[str, Any], steps: int) -> list[float]:
    """Return the learning rate of each step."""
    optimizer = made["optimizer"]([nn.Parameter(torch.zeros(1))])
    schedule = made["scheduler"](optimizer)["scheduler"]
    actual = []
    for _ in range(steps):
        actual.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return actual


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_on_a_gpu_an_optimizer_is_one_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*overrides: str) -> tuple[int, Any, nn.Parameter]:
        made = offered(f"optimizer={name}", *overrides)["optimizer"]
        weights = [nn.Parameter(torch.arange(1.0, 4)) for _ in range(5)]
        optimizer = made(weights)
        for _ in range(2):  # the first one makes the state
            for weight in weights:
                weight.grad = torch.ones(3)
            with Kernels() as kernels:
                optimizer.step()
        return kernels.kernels, optimizer, weights[-1]

    plain, optimizer, weight = step()
    assert not optimizer.param_groups[0]["fused"]  # on a CPU
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    fused, optimizer, other = step()
    assert (fused, plain > 10) == (1 if name == "sgd" else 2, True)  # Adam counts steps in another one
    assert torch.allclose(weight, other)
    assert not _optimizer_handles_unscaling(optimizer), "Lightning would refuse to clip"
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert all(group["fused"] for group in optimizer.param_groups)
    assert not step("+optimizer.fused=false")[1].param_groups[0]["fused"]


@pytest.mark.usefixtures("whole_run")
def test_only_what_torch_can_fuse_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    sgd, rmsprop = (offered(f"optimizer={name}")["optimizer"] for name in ("sgd", "rmsprop"))
    assert "fused" not in rmsprop([nn.Parameter(torch.ones(2))]).param_groups[0]
    for wrong in (torch.ones(2, dtype=torch.complex64), torch.ones(4)[::2], torch.ones(1).expand(2)):
        assert not sgd([nn.Parameter(wrong), nn.Parameter(torch.ones(2))]).param_groups[0]["fused"]


@pytest.mark.parametrize("decays", [False, True])
def test_biases_and_norms_decay_on_request(decays: bool) -> None:
    made = offered("optimizer=adamw", "optimizer.weight_decay=0.02")["optimizer"]
    model = small_resnet18(optimizer=made, decay_norms_and_biases=decays)
    groups = model.configure_optimizers()["optimizer"].param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    weights = {id(p) for p in model.parameters() if decays or p.ndim > 1}
    assert decayed == weights
    assert {group["weight_decay"] for group in groups} == ({0.02} if decays else {0.02, 0.0})


@pytest.mark.parametrize(
    ("overrides", "kind", "options"),
    [
        (
            ["optimizer=adamw", "optimizer.betas=[0.8,0.9]", "lr=0.2"],
            torch.optim.AdamW,
            {"betas": (0.8, 0.9), "lr": 0.2},
        ),
        (["optimizer._target_=torch.optim.Adam", "~optimizer.momentum", "~optimizer.nesterov"], torch.optim.Adam, {}),
        (["optimizer.lr=0.5"], torch.optim.SGD, {"lr": 0.5}),
        (["lr_scaling=linear", "batch_size=128"], torch.optim.SGD, {"lr": 0.04}),
    ],
)
def test_any_optimizer_by_hydras_convention(
    overrides: list[str], kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    optimizer: torch.optim.Optimizer = offered(*overrides)["optimizer"]([nn.Parameter(torch.zeros(1))])
    assert type(optimizer) is kind
    assert {name: optimizer.param_groups[0][name] for name in options} == options


@pytest.mark.parametrize(
    ("overrides", "lr"),
    [
        ([], 0.02),
        (["optimizer=adamw"], 0.001),
        (["optimizer=adam"], 0.001),
        (["optimizer=rmsprop"], 0.001),
        (["optimizer=muon"], 0.002),
        (["optimizer=adamw", "lr=0.1"], 0.1),
        (["optimizer=adamw", "optimizer.lr=0.005"], 0.005),
        (["optimizer=adamw", "lr_scaling=linear", "batch_size=128"], 0.002),
        (["~optimizer.lr"], 0.001),  # a file that has none
        (["experiment=mnist_cnn"], 0.05),
        (["experiment=mnist_cnn", "optimizer=adamw"], 0.05),
    ],
)
def test_an_optimizer_brings_its_learning_rate_and_lr_decides(overrides: list[str], lr: float) -> None:
    config = check(dict(composed("max_epochs=2", *overrides)))
    optimizer = training_arguments(config, SAMPLES)["optimizer"]([nn.Parameter(torch.zeros(1))])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr)
    ratio = config.layout.batch_size / config.reference_batch_size if config.lr_scaling == "linear" else 1
    assert config.record["lr"] == pytest.approx(lr / ratio)
    assert "lr" not in config.record["optimizer"], "a record that names two would contradict itself"


def test_two_learning_rates_are_refused_but_not_one_that_is_deleted() -> None:
    deleted = dict(composed("~optimizer.lr"))
    assert check(deleted, overridden=["optimizer.lr"]).lr == 0.001
    both = dict(composed("optimizer.lr=0.1", "lr=0.2"))
    with pytest.raises(
        UserError, match=r"^optimizer\.lr=0\.1: lr=0\.2 is given too and overrides it: give lr=\.\.\. alone$"
    ):
        check(both, overridden=["optimizer.lr", "lr"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer._target_=torch.optim.Lion"], "optimizer._target_=torch.optim.Lion: torch.optim has no Lion"),
        (["+optimizer.beta=1"], r"optimizer.beta: SGD takes no such option; leave it out \(~optimizer.beta\)"),
        (
            ["optimizer._target_=torch.optim.Rprop"],
            r"\(~optimizer.momentum ~optimizer.nesterov ~optimizer.weight_decay\)",
        ),
        (["optimizer.momentum=null"], "^optimizer.momentum=null: must be a valid number$"),
        (["optimizer=adamw", "optimizer.betas=x"], r"^optimizer: AdamW\(lr=0.001, betas=x, "),
        (["optimizer=adamw", "optimizer.betas=[0.9]"], r"^optimizer: AdamW\(.*betas=.0.9., .*: IndexError: list index"),
        (["optimizer.momentum=0"], "^optimizer: Nesterov momentum requires a momentum"),
        (
            ["optimizer.param_groups._target_=lockstep.vision.optimizers.Nope"],
            "lockstep.vision.optimizers has no Nope$",
        ),
        (["+optimizer.param_groups.a=1"], "^optimizer.param_groups.a: LrScale takes no such option"),
        (["scheduler=cosine", "scheduler.warmup_steps=21"], r"^scheduler.warmup_steps=21: must be 0 to 20"),
        (["scheduler=cosine", "scheduler.final=2"], "^scheduler.final=2: "),
        (["scheduler=cosine", "scheduler.interval=epoch"], "^scheduler: total_steps counts steps, and the schedule is"),
        (["scheduler=constant", "scheduler.warmup_steps=-1"], "^scheduler.warmup_steps=-1: must be a whole number"),
        (["scheduler=warm_restarts", "scheduler.T_mult=0"], "^scheduler: .*T_mult"),
        (["optimizer=muon", "optimizer.momentum=1"], "^optimizer.momentum=1: must be at least 0 and below 1"),
        (["optimizer=muon", "optimizer.betas=[0.9]"], r"^optimizer.betas=\[0.9\]: must be two numbers"),
        (["optimizer=muon", "optimizer.weight_decay=-1"], "^optimizer.weight_decay=-1: must be at least 0"),
        (["optimizer=muon", "+optimizer.fused=true"], "^optimizer.fused: Muon takes no such option"),
        (["scheduler.peak=1.0"], "^scheduler.peak=1.0: "),
        (["scheduler.peak=later:total"], "^scheduler.peak=later:total: did you mean total_steps"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        offered(*overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("whole_run")
def test_a_schedule_of_a_metric_names_it() -> None:
    with pytest.raises(UserError, match=r"ReduceLROnPlateau needs a metric: give \+scheduler.monitor="):
        offered("scheduler=plateau", "~scheduler.monitor")
    with pytest.raises(UserError, match=r"^scheduler.monitor=train/loss is known .* only: .*interval=epoch$"):
        offered("scheduler=plateau", "scheduler.monitor=train/loss", "++scheduler.interval=step")
    for late, message in (
        (
            ["scheduler.interval=step"],
            "interval=step reads val/loss every 1 step, .* every 10 steps: .*=epoch or val_every=1",
        ),
        (["val_every=12"], "interval=epoch reads val/loss every 10 steps, .* every 12 steps: use val_every=10"),
    ):
        with pytest.raises(UserError, match=f"^scheduler.{message}$"):
            offered("scheduler=plateau", *late)
    offered("scheduler=plateau", "scheduler.interval=step", "val_every=5", "+scheduler.frequency=5")  # the controls
    offered("scheduler=plateau", "val_every=5")


def test_schedules_are_their_closed_forms() -> None:
    def factors(schedule: Any, **options: Any) -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        return schedule(optimizer, **options).lr_lambdas[0]

    cosine = factors(schedules.cosine, total_steps=104, warmup_steps=4, final=0.1)
    assert [cosine(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    for step in range(4, 104):
        assert cosine(step) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4) / 100)) / 2)
    assert cosine(104) == cosine(200) == pytest.approx(0.1)
    assert factors(schedules.cosine, total_steps=3, warmup_steps=3)(2) == 1.0
    constant = factors(schedules.constant, warmup_steps=4)
    assert [constant(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    onecycle = factors(schedules.onecycle, total_steps=100, peak=0.2, start=0.1)
    assert [onecycle(s) for s in (0, 10, 20, 60, 100)] == pytest.approx([0.1, 0.55, 1.0, 0.5, 0.0])
    assert max(range(100), key=onecycle) == 20


def test_a_learning_rate_that_a_schedule_replaces_is_refused() -> None:
    one_cycle = "scheduler._target_=torch.optim.lr_scheduler.OneCycleLR"
    raw = dict(
        composed("max_epochs=2", "scheduler=constant", "~scheduler.warmup_steps", one_cycle, "+scheduler.max_lr=1")
    )
    refuse_keys_without_effect(check(raw))
    with pytest.raises(UserError, match=r"^lr has no effect, since scheduler\.max_lr=1"):
        refuse_keys_without_effect(check(raw, overridden={"lr"}))


@pytest.mark.usefixtures("processes")
def test_a_resumed_run_gets_the_rate_of_its_new_settings(run_train: Program) -> None:
    """Each epoch has six steps, so a schedule of every fourth step moves once an epoch."""
    every = (
        *("scheduler=constant", "~scheduler.warmup_steps", "scheduler.interval=step", "+scheduler.frequency=4"),
        *("scheduler._target_=torch.optim.lr_scheduler.ExponentialLR", "+scheduler.gamma=0.5"),
    )

    def resumed(*overrides: str, epochs: int, new: str) -> str:
        run_train(*TINY, "lr=0.16", f"max_epochs={epochs}", f"name=run{epochs}", *overrides)
        (folder,) = (run_train.outputs / f"run{epochs}").iterdir()
        return run_train(f"resume={folder}", f"max_epochs={epochs + 1}", new).stderr

    assert "samples/s  lr 0.02\n" in resumed(*every, epochs=2, new="optimizer.weight_decay=0.1")
    assert "samples/s  lr 0.16\n" in resumed(epochs=1, new="scheduler=plateau"), "the first schedule has ended with 0"


def test_a_rate_that_is_one_number_for_all_groups_is_refused_beside_factors() -> None:
    groups = [{"lr_scale": 1.0}, {"lr_scale": 0.1}]
    scale = optimizers.LrScale({"a": 0.1})
    assert scale.scaled_options({"eta_min": 0.0, "max_lr": 1.0}, groups) == {"max_lr": [1.0, 0.1]}
    with pytest.raises(UserError, match="one eta_min for all groups"):
        scale.scaled_options({"eta_min": 0.01}, groups)


def test_schedules_of_torch_use_the_length_of_the_run() -> None:
    def of_torch(name: str, *options: str) -> dict[str, Any]:
        target = f"scheduler._target_=torch.optim.lr_scheduler.{name}"
        return offered("scheduler=constant", "~scheduler.warmup_steps", target, *options)

    annealed = rates(of_torch("CosineAnnealingLR", "+scheduler.T_max=later:total_steps"), 21)
    assert annealed == pytest.approx([0.02 * (1 + math.cos(math.pi * step / 20)) / 2 for step in range(21)])
    assert max(rates(of_torch("OneCycleLR", "+scheduler.max_lr=later:lr"), 20)) == pytest.approx(0.02)
    longer = ("+scheduler.max_lr=later:lr", "+scheduler.epochs=10", "+scheduler.steps_per_epoch=later:steps_per_epoch")
    assert rates(of_torch("OneCycleLR", *longer), 21)[-1] > 0.01, "epochs counts, though total_steps is offered"
    assert rates(offered("scheduler=constant"), 3) == [0.02] * 3


def test_multistep_and_warm_restarts_follow_the_length_of_an_epoch() -> None:
    def of_torch(kind: Any, steps: int, **options: Any) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.02)
        return rates(
            {"optimizer": lambda _: optimizer, "scheduler": lambda _: {"scheduler": kind(optimizer, **options)}}, steps
        )

    torchs = of_torch(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, 70, T_0=10, T_mult=2, eta_min=0.002)
    assert rates(offered("scheduler=warm_restarts", "scheduler.eta_min=0.002"), 70) == pytest.approx(torchs)
    multistep = offered("scheduler=multistep", "scheduler.milestones=[2,5]")
    optimizer = multistep["optimizer"]([nn.Parameter(torch.zeros(1))])
    assert multistep["scheduler"](optimizer)["interval"] == "epoch"


def test_muon_takes_the_steps_of_torchs_muon_and_of_adamw() -> None:
    torch.manual_seed(0)
    shapes = ((6, 40), (40, 6), (8, 3, 5, 5), (7,))
    ours, theirs = ([nn.Parameter(torch.randn(shape)) for shape in shapes] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        other.data = one.data.flatten(1).clone() if one.ndim > 1 else one.data.clone()
    begun = [parameter.detach().clone() for parameter in ours]
    muon = optimizers.Muon(ours, lr=0.01, weight_decay=0.1)
    matrices = torch.optim.Muon(theirs[:3], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    others = torch.optim.AdamW(theirs[3:], lr=0.01, weight_decay=0.1)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.reshape(other.shape)
        for optimizer in (muon, matrices, others):
            optimizer.step()
    moved = [one.detach() - before for one, before in zip(ours, begun, strict=True)]
    expected = [(other.detach().view_as(before) - before) for other, before in zip(theirs, begun, strict=True)]
    for ours_moved, theirs_moved in zip(moved[:3], expected[:3], strict=True):  # torch's computes in bf16
        assert float((ours_moved - theirs_moved).norm() / theirs_moved.norm()) < 0.02
    assert torch.allclose(moved[3], expected[3], rtol=1e-5, atol=1e-7)


FUSED = ("+optimizer.fused=false", "+optimizer.fused=true")
TASK = (
    "data=synthetic",
    "data.samples=190",
    "batch_size=170",
    "precision=64-true",
    "data.image_size=12",
    "callbacks.checkpoint.monitor=null",
)


@pytest.mark.usefixtures("processes")
def test_a_fused_optimizer_makes_the_same_steps(tmp_path: Path) -> None:
    """Where a rank has no sample: the last step of an epoch has one, and torch's fused kernel takes a gradient's memory
    for that of its parameter. And where a run goes on, with such a step, in another memory format."""

    def train(choice: str) -> Run:
        program = Program(tmp_path / choice[-4:])
        layout = ("strategy=ddp", "devices=2", "threads=1", "scheduler=constant", choice)
        first = program(*TASK, *layout, "speed.memory_format=contiguous", "max_steps=3")
        before = first.summary["weights_sha256"]
        last = program(f"resume={first.folder}", choice, "speed.memory_format=channels_last", "max_steps=6")
        assert last.summary["weights_sha256"] != before
        return last

    plain, fused = map(train, FUSED)
    assert plain.summary["steps"] == fused.summary["steps"] == 6
    assert apart(plain, fused) < 1e-12


# What ends a run early, a schedule that goes up again, clipping by value
ENDED = (
    *(*TINY, "pieces=2", "exact=true", "logger=none", "callbacks=early_stopping"),
    *("callbacks.early_stopping.patience=3", "callbacks.early_stopping.min_delta=1"),
    *("gradient_clip_val=0.002", "gradient_clip_algorithm=value", "lr=0.3"),
)


def test_the_same_bits_on_another_layout_and_resumed(run_train: Program) -> None:
    task = (*ENDED, "optimizer=muon", "scheduler=warm_restarts")
    alone = run_train(*task, "max_epochs=9", "name=alone").stderr
    rates = [line.rpartition("  lr ")[2] for line in alone.splitlines() if "  lr " in line]
    run_train(*task, "max_epochs=2", "strategy=ddp", "devices=2", "name=moved")
    run_train(f"resume={next((run_train.outputs / 'moved').iterdir())}", "strategy=auto", "devices=1", "max_epochs=9")
    run_train(*task, "max_epochs=9", "gradient_clip_algorithm=norm", "name=other")
    names = ("alone", "moved", "other")
    expected, moved, control = (summary_of(next((run_train.outputs / name).iterdir())) for name in names)
    assert (moved["weights_sha256"], moved["steps"]) == (expected["weights_sha256"], expected["steps"])
    assert expected["epochs"] == 4, "the first validation, and three that were no better by 1"
    assert control["weights_sha256"] != expected["weights_sha256"]
    assert len(set(rates)) > 1, rates


class CustomOptimizer:
    """Builds its optimizer itself, as most LightningModules do."""

    def __init__(self, lr: float = 1e-3, scheduler: str = "cosine", total_steps: int = 7) -> None: ...


class RunsOptimizer:
    def __init__(self, optimizer: Any, lr: float = 1e-3, scheduler: Any = None) -> None: ...


class OptimizerByName:
    def __init__(self, optimizer: str = "adam", lr: float = 1e-3) -> None: ...


class ReplaceableOptimizer:
    def __init__(self, optimizer: Any = torch.optim.Adam) -> None: ...


@pytest.mark.parametrize(
    ("target", "overrides", "passed"),
    [
        (CustomOptimizer, [], {"total_steps"}),
        (CustomOptimizer, ["lr=0.02"], {"lr", "total_steps"}),  # given, though it is the default too
        (CustomOptimizer, ["optimizer=adamw"], {"lr", "total_steps"}),
        (CustomOptimizer, ["lr_scaling=linear"], {"lr", "total_steps"}),
        (CustomOptimizer, ["experiment=mnist_cnn", "model=mnist_cnn"], {"lr", "total_steps"}),
        (CustomOptimizer, ["scheduler=cosine"], {"total_steps"}),
        (RunsOptimizer, [], {"lr", "optimizer", "scheduler"}),
        (OptimizerByName, [], set()),
        (OptimizerByName, ["lr=0.1"], {"lr"}),
        (
            ReplaceableOptimizer,
            [],
            {"optimizer"},
        ),  # as in lockstep.vision.models.ImageClassifier: conf/optimizer counts
        (ReplaceableOptimizer, ["lr=0.1"], {"optimizer"}),
        (ReplaceableOptimizer, ["optimizer=adamw"], {"optimizer"}),
    ],
)
def test_a_constructors_default_yields_to_what_the_user_gives_only(
    target: type, overrides: list[str], passed: set[str]
) -> None:
    raw = dict(composed("max_epochs=2", *overrides))
    requested = {override.partition("=")[0] for override in overrides}
    requested |= {"lr", "optimizer"} if "experiment" in requested else set()  # see test_the_keys_of_an_experiment
    config = replace(check(raw), requested=frozenset(requested))
    offers = without_defaulted(training_arguments(config, SAMPLES), target, config)
    assert set(offers) & parameters(target) == passed


def test_the_keys_of_an_experiment_count_as_set() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        made = hydra_compose("train", ["experiment=mnist_cnn"], return_hydra_config=True)
    HydraConfig.instance().set_config(made)
    try:
        assert {"lr", "optimizer"} <= experiment_keys()
    finally:
        HydraConfig.instance().cfg = None
    assert experiment_keys() == set()


def test_an_lr_of_train_yaml_counts_as_set_and_that_of_an_optimizers_page_does_not() -> None:
    raw = dict(composed("max_epochs=2"))
    assert check(raw).requested == set()
    assert check({**raw, "lr": 0.5}).requested == {"lr"}


def test_an_optimizer_inside_a_model_keeps_its_default_too() -> None:
    custom = {"_target_": "torch.optim.Adam", "_partial_": True}
    assert "lr" not in instantiate("optimizer", custom, ("lr",), lr=0.02).keywords
    assert instantiate("optimizer", {**custom, "lr": "later:lr"}, ("lr",), lr=0.02).keywords["lr"] == 0.02
    assert instantiate("optimizer", custom, lr=0.02).keywords["lr"] == 0.02
