"""The loop that makes steps of pieces, against Lightning's own: same hooks in the same order, same weights, same logs.

It builds on private names of Lightning (in lockstep/lightning/); these tests fail when upstream changes them.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.profilers import SimpleProfiler
from plain import QUIET
from rank_fits import layout_of, trainer_and_data
from torch import nn
from torch.nn import functional as F

from lockstep.arithmetic.layout import Layout
from lockstep.data import ArrayDataset, Spec, Splits, StepData
from lockstep.data.augment import Augment
from lockstep.errors import NonFinite, UserError
from lockstep.lightning.epochs import validation_or_epoch_end_follows
from lockstep.step.batch import StepBatch
from lockstep.step.finite import FiniteGradientCheck
from lockstep.strategies import DDP

SAMPLES, BATCH = 22, 8  # the last step has 6
HOOKS = [
    name
    for name in dir(pl.Callback)
    if name.startswith("on_") and not name.endswith(("_checkpoint", "_exception")) and "test" not in name
]


class Net(pl.LightningModule):
    """As in Lightning's tutorial."""

    def __init__(self, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = [nn.BatchNorm1d(6)] if norm else []
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), *middle, nn.Dropout(dropout), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class Recorder(pl.Callback):
    """Writes down which hook was called, and when."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in HOOKS:
            return lambda trainer, *args, **kwargs: self.calls.append(f"{name} {trainer.global_step}")
        return super().__getattribute__(name)


class Loud(Net):
    """Its own hooks are told apart by what they see: the step, and the hook that Lightning says is running."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(norm=True)
        self.calls = calls


def _loud(name: str) -> Any:
    def hook(self: Loud, *args: Any, **kwargs: Any) -> None:
        optimizers = [each in self.trainer.optimizers for each in args if isinstance(each, torch.optim.Optimizer)]
        call = f"module {name} {self._current_fx_name} {self.trainer.global_step} {len(args)} {optimizers}"
        self.calls.append(call)

    return hook


for hook in HOOKS:
    if hasattr(pl.LightningModule, hook) and hook != "on_validation_model_zero_grad":
        setattr(Loud, hook, _loud(hook))


class Logs(pl.loggers.Logger):
    """Keeps what it is given."""

    name, version = "logs", 0

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append(f"{step} {sorted(metrics.items())}")

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


def splits(validation: bool = True) -> Splits:
    random = np.random.default_rng(1)
    data = ArrayDataset(random.integers(0, 256, (SAMPLES, 1, 4, 4), dtype=np.uint8), random.integers(0, 3, SAMPLES))
    return Splits(
        data, data if validation else None, data, Spec(1, 4, ("a", "b", "c"), (0.5,), (0.25,)), "none", Augment()
    )


class Whole(StepData):
    """Gives Lightning's own loop what ours gives to `training_step`: the step's only piece."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (
            self.prepare(batch.micro_batches[0])
            if isinstance(batch, StepBatch)
            else super().on_after_batch_transfer(batch, 0)
        )


def fit(
    folder: Path,
    module: pl.LightningModule,
    ours: bool,
    pieces: int = 1,
    exact: bool = False,
    policy: str = "stop",
    later: bool = False,
    validation: bool = True,
    **options: Any,
) -> Any:
    layout, data = layout_of(1, exact, BATCH, pieces), splits(validation)
    recorder = Recorder()
    if isinstance(module, Loud):
        module.calls = recorder.calls
    options = {"callbacks": [recorder], "default_root_dir": folder, "max_epochs": 2, **options}
    if ours:
        trainer, step_data = trainer_and_data(0, layout, data, hooks=[FiniteGradientCheck(policy, later)], **options)
    else:
        strategy: Any = DDP().build(layout).strategy
        trainer = pl.Trainer(strategy=strategy, use_distributed_sampler=False, **QUIET | options)
        step_data = Whole(data, layout, seed=0, num_workers=0)
    trainer.fit(module, datamodule=step_data)
    return trainer, recorder.calls


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([value.double().flatten() for value in module.state_dict().values()])


OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_clip_val": 0.1},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"val_check_interval": 2, "max_steps": 5},
    {"max_steps": 4, "limit_val_batches": 0},  # else ours alone has a validation there
    {"check_val_every_n_epoch": 2},
    {"limit_train_batches": 2},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_one_piece_is_lightnings_loop(tmp_path: Path, options: dict[str, Any]) -> None:
    ours, theirs = Loud([]).double(), Loud([]).double()  # evaluation sums in float64, Lightning in what is logged
    trainer, calls = fit(tmp_path, ours, ours=True, logger=Logs(), log_every_n_steps=2, **options)
    plain, expected = fit(tmp_path, theirs, ours=False, logger=Logs(), log_every_n_steps=2, **options)
    assert calls == expected
    assert "on_before_optimizer_step 0" in calls
    assert rounded(trainer.logger.lines) == rounded(map(plural, plain.logger.lines))
    assert torch.equal(weights(ours), weights(theirs))
    assert trainer.global_step == plain.global_step
    assert trainer.callback_metrics.keys() == plain.callback_metrics.keys()
    for name, value in plain.callback_metrics.items():
        torch.testing.assert_close(trainer.callback_metrics[name], value, rtol=1e-12, atol=0, msg=name)
    assert trainer.fit_loop.state_dict() == plain.fit_loop.state_dict()


class Follows(pl.Callback):
    """Asks after each step whether a validation or the end of the epoch follows, and writes down what does."""

    def __init__(self) -> None:
        self.answers: list[bool] = []
        self.followed: list[bool] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.answers.append(validation_or_epoch_end_follows(trainer))
        self.followed.append(False)

    def on_validation_start(self, *args: Any) -> None:
        self.followed[-1] = True

    def on_train_epoch_end(self, *args: Any) -> None:
        self.followed[-1] = True


@pytest.mark.parametrize(
    "options",
    [
        {"val_check_interval": 2},
        {"val_check_interval": 2, "limit_val_batches": 0},
        {"val_check_interval": 2, "validation": False},
        {"val_check_interval": 2, "check_val_every_n_epoch": 2, "max_epochs": 4},
        {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 3},
        {"val_check_interval": 100, "check_val_every_n_epoch": None, "max_steps": 4},
    ],
)
def test_what_follows_a_step_is_known(tmp_path: Path, options: dict[str, Any]) -> None:
    follows = Follows()
    fit(tmp_path, Net(), ours=True, callbacks=[follows], **options)
    assert follows.answers == follows.followed
    assert {*follows.answers} == {True, False}


def test_a_checkpoint_may_have_weights_alone(tmp_path: Path) -> None:
    trainer, _ = fit(tmp_path, Net(), ours=True)
    for weights_only in (False, True):
        trainer.save_checkpoint(file := tmp_path / f"{weights_only}.ckpt", weights_only=weights_only)
        assert ("optimizer_states" in torch.load(file, weights_only=False)) is not weights_only


def rounded(lines: Iterable[str]) -> list[str]:
    """Return lines with their numbers rounded: means of an epoch are rounded once, Lightning's at each step."""
    return [re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.12g}", line) for line in lines]


def plural(line: str) -> str:
    """Return what Lightning logs, at the step that it is of: Lightning counts that step later."""
    step, output = line.split(" ", 1)
    return f"{int(step) + 1} {output}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"val_check_interval": 100}, [6]),
        ({"val_check_interval": 3}, [3, 6]),
        ({"val_check_interval": 100, "max_steps": 4}, [4]),  # in the middle of an epoch
        ({"val_check_interval": 3, "max_steps": 4, "check_val_every_n_epoch": 1}, [3, 4]),
    ],
)
def test_validation_comes_after_the_last_step_too(tmp_path: Path, options: dict[str, Any], expected: list[int]) -> None:
    def validated(ours: bool) -> list[int]:
        _, calls = fit(tmp_path, Net(), ours, **{"check_val_every_n_epoch": None, **options})
        return [int(call.split()[1]) for call in calls if call.startswith("on_validation_start ")]

    assert validated(ours=True) == expected
    every = options["val_check_interval"]
    assert validated(ours=False) == [step for step in expected if step % every == 0], "the control: Lightning's"


@pytest.mark.parametrize(("options", "steps"), [({}, 3), ({"min_steps": 4}, 4), ({"min_epochs": 2}, 6)])
def test_who_stops_early_waits_for_the_fewest_steps(tmp_path: Path, options: dict[str, Any], steps: int) -> None:
    class Stops(Net):
        def on_validation_end(self) -> None:
            self.trainer.should_stop = self.trainer.global_step > 0

    ours, theirs = (fit(tmp_path, Stops(), ours, max_epochs=3, **options)[0] for ours in (True, False))
    assert ours.global_step == theirs.global_step == steps


class Reports(Net):
    """Returns more than its loss, and keeps what it is told of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        right = (logits.argmax(1) == batch[1]).double().mean()
        return {"loss": F.cross_entropy(logits, batch[1]), "acc": right, "size": len(logits), "logits": logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(batch, StepBatch)
        logits = outputs["logits"]
        assert len(logits) == batch.num_local_samples
        assert not any(value.requires_grad for value in outputs.values())
        self.reports.append({name: float(value) for name, value in outputs.items() if value is not logits})


def test_a_step_reports_means_over_its_samples(tmp_path: Path) -> None:
    whole, cut = Reports().double(), Reports().double()
    fit(tmp_path, whole, ours=True)
    fit(tmp_path, cut, ours=True, pieces=4)
    for one, four in zip(whole.reports, cut.reports, strict=True):
        assert list(one) == list(four) == ["loss", "acc", "size"]
        assert (one["loss"], one["acc"]) == pytest.approx((four["loss"], four["acc"]), rel=1e-6)
    assert [reports["size"] for reports in cut.reports[:3]] == pytest.approx([2, 2, (2 * 2 + 2 * 2 + 1 + 1) / 6])


def test_each_piece_of_each_step_has_other_random_numbers(tmp_path: Path) -> None:
    """Whatever is drawn outside of the steps."""

    class Draws(Net):
        def __init__(self) -> None:
            super().__init__()
            self.draws: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.draws.append(float(torch.rand((), dtype=torch.float64)))
            return super().training_step(batch, batch_idx)

    first, second = Draws(), Draws()
    for net in (first, second):
        fit(tmp_path, net, ours=True, pieces=4)
        torch.rand(3)
    assert len({*first.draws}) == len(first.draws) == 2 * (4 + 4 + 4)
    assert first.draws == second.draws


class Leaves(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Many(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).expand(4)


class Forgets(Net):
    def optimizer_step(self, *args: Any) -> None:
        pass


class HasNoMemory(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


class TooLarge(Net):
    def configure_optimizers(self) -> Any:
        return HasNoMemory(self.parameters(), lr=0.1)


class Skips(Net):
    """Leaves out the rest of an epoch, of which the number of steps could not tell."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


@pytest.mark.parametrize(
    ("net", "output"),
    [
        (Skips, "on_train_batch_start returned -1, but the rest of an epoch can't be skipped"),
        (Leaves, "training_step returned NoneType: it must return"),
        (Many, r"training_step returned a loss of shape \[4\]: it must be one number"),
        (TooLarge, "step 1: out of memory in the optimizer: use an optimizer with less state"),
        (Forgets, "Forgets.optimizer_step did not call its closure: it must"),
    ],
)
def test_a_step_needs_a_loss_its_closure_and_memory(tmp_path: Path, net: Any, output: str) -> None:
    with pytest.raises(UserError, match=output):
        fit(tmp_path, net(), ours=True)


class ByEpoch(Net):
    """Its learning rate falls with epochs, its batches have no number, and its loss comes in a dict."""

    def training_step(self, batch: Any) -> dict[str, Any]:  # type: ignore[override]
        loss = super().training_step(batch, 0)
        return {"loss": loss, "seen": len(batch[0])}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)]


class Clips(Net):
    """Clips by itself."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")


class Plateau(Net):
    """Its learning rate follows a metric."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        config = {"scheduler": schedule, "monitor": "train/loss_step", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Steps(Net):
    """Makes the optimizer step itself."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (batch_idx + 1)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


@pytest.mark.parametrize("net", [ByEpoch, Clips, Plateau, Steps])
def test_what_a_module_brings_is_used(tmp_path: Path, net: Any) -> None:
    ours, theirs, control = net(), net(), Net()
    _, calls = fit(tmp_path, ours, ours=True, max_epochs=3)
    _, expected = fit(tmp_path, theirs, ours=False, max_epochs=3)
    fit(tmp_path, control, ours=True, max_epochs=3)
    assert calls == expected
    assert torch.equal(weights(ours), weights(theirs))
    assert not torch.equal(weights(ours), weights(control))


def test_pieces_add_backward_passes_and_nothing_else(tmp_path: Path) -> None:
    _, one = fit(tmp_path, Net(), ours=True)
    _, four = fit(tmp_path, Net(), ours=True, pieces=4)
    backward = [call for call in four if "before_backward" in call]
    assert len(backward) == 4 * len([call for call in one if "before_backward" in call])
    # a validation set is cut into at least as many chunks as a step has pieces
    rest = [
        [call for call in calls if "before_backward" not in call and "validation_batch" not in call]
        for calls in (one, four)
    ]
    assert rest[0] == rest[1]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_of_a_step_are_the_mean_over_its_pieces(
    tmp_path: Path, momentum: float | None, exact: bool
) -> None:
    """`momentum=None`: and those of a run the mean over its steps."""
    module = Net(norm=True)
    norm: Any = module.net[2]
    norm.momentum = momentum
    seen: list[torch.Tensor] = []
    norm.register_forward_hook(lambda layer, args, _: seen.append(args[0].mean(0)) if layer.training else None)
    fit(tmp_path, module, ours=True, pieces=2, exact=exact, max_epochs=1)
    expected = torch.zeros(6)
    for number, step in enumerate(torch.stack(seen).view(3, 2, -1).mean(1), 1):
        expected = expected.lerp(step, momentum or 1 / number)
    assert torch.allclose(norm.running_mean, expected, atol=1e-6)
    assert int(norm.num_batches_tracked) == 3


class Broken(Net):
    """Its loss is not finite in one step, nor is what its layers have seen."""

    skipped: list[bool]

    def on_train_start(self) -> None:
        self.skipped = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.skipped.append(batch.skipped)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == 1:
            batch = (batch[0] * float("nan"), batch[1])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("later", "steps", "known"), [(False, -1, 1), (True, -1, 2), (True, 2, 1)])
def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path, later: bool, steps: int, known: int) -> None:
    """On a GPU a step later, since the host does not wait for the device at each step; but not after the last."""
    module = Broken()
    with pytest.raises(NonFinite, match=r"step 2: the gradient is not finite.*, nor is the loss of the step's s"):
        fit(tmp_path, module, ours=True, pieces=2, later=later, max_steps=steps)
    assert module.trainer.global_step == known


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_step_left_out_changes_nothing(tmp_path: Path, pieces: int) -> None:
    """Neither weights nor running statistics."""
    once, module = Broken(norm=True), Broken(norm=True)
    fit(tmp_path, once, ours=True, pieces=pieces, max_steps=1)
    trainer, _ = fit(tmp_path, module, ours=True, pieces=pieces, max_steps=2, policy="skip")
    assert trainer.global_step == 2
    assert module.skipped == [False, True]
    assert torch.equal(weights(module), weights(once))
    assert not torch.equal(weights(once), weights(Broken(norm=True)))


class Overflows(Net):
    """Its gradient is not finite, at any scale, though its loss is."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + (next(self.parameters()).flatten()[0] * 0).abs().sqrt()


def scaled(start: float = 2.0**16) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=start))


@pytest.mark.parametrize("later", [False, True])
def test_a_loss_scaler_does_not_hide_what_is_not_finite(tmp_path: Path, later: bool) -> None:
    with pytest.raises(
        NonFinite, match=r"step 2: the gradient is not finite.*, nor is the loss of the step's samples.*: nonf"
    ):
        fit(tmp_path, Broken(), ours=True, pieces=2, later=later, plugins=[scaled()])
    with pytest.raises(
        NonFinite, match=r"step 1\d: .* every loss is finite and the loss scale is 3e-05: use precision"
    ):
        fit(tmp_path, Overflows(), ours=True, later=later, max_epochs=20, plugins=[scaled(2.0**-2)])


class Still(Net):
    """Its normalisation is frozen."""

    def __init__(self) -> None:
        super().__init__(norm=True)
        nn.init.uniform_(self.net[2].running_mean)  # type: ignore[arg-type]

    def on_train_epoch_start(self) -> None:
        self.net[2].eval()


@pytest.mark.parametrize("exact", [False, True])
def test_running_statistics_that_are_frozen_stay(tmp_path: Path, exact: bool) -> None:
    module, fresh = Still(), Still()
    fit(tmp_path, module, ours=True, pieces=8, exact=exact, max_epochs=3)
    before, after = fresh.net[2].state_dict(), module.net[2].state_dict()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(before[name], after[name]), name
    assert not torch.equal(before["weight"], after["weight"])


class Counted(pl.Callback):
    """Has one hook in its class, and one that it sets on itself after two steps. Counts the calls of all."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append(f"end {trainer.global_step}")
        if trainer.global_step == 2:
            vars(self)["on_after_backward"] = lambda trainer, module: self.seen.append(f"set {trainer.global_step}")
            late = pl.callbacks.LambdaCallback(on_train_batch_start=lambda *_: self.seen.append("late"))
            trainer.callbacks.append(late)


def functions_called(action: Any) -> dict[tuple[str, str], int]:
    """Run an action. Return how often each Python function was called, by the end of its file's name and its name."""
    counts: Counter[tuple[str, str]] = Counter()

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            counts["/".join(Path(frame.f_code.co_filename).parts[-2:]), frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return counts


HOOKS_OF_A_STEP = [
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    "on_before_optimizer_step",
]


@pytest.mark.parametrize("profiled", [False, True])
def test_a_step_calls_only_hooks_that_somebody_has(tmp_path: Path, profiled: bool) -> None:
    """With a profiler, which measures each call, all are called."""
    counted, nobody = Counted(), pl.Callback()
    options: dict[str, Any] = {"callbacks": [nobody, counted], "limit_val_batches": 0, "max_epochs": 1}
    if profiled:
        options["profiler"] = SimpleProfiler()
    calls = functions_called(lambda: fit(tmp_path, Net(), ours=True, **options))
    assert counted.seen == ["end 1", "end 2", "late", "set 2", "end 3"]
    empty = sum(calls["callbacks/callback.py", hook] for hook in HOOKS_OF_A_STEP)
    contexts = calls["profilers/profiler.py", "profile"]
    clips = calls["core/module.py", "configure_gradient_clipping"]
    assert (empty > 0, contexts > 0) == (profiled, profiled)
    assert clips == 0


@pytest.mark.usefixtures("whole_run")
def test_a_step_calls_fewer_functions_than_lightnings_loop(tmp_path: Path) -> None:
    """Python functions called in a step of a linear network, with ten callbacks that have no hook of a step."""

    def calls(steps: int, ours: bool) -> int:
        callbacks = [type(f"Callback{number}", (pl.Callback,), {})() for number in range(10)]
        options: dict[str, Any] = {"callbacks": callbacks, "limit_val_batches": 0, "max_epochs": 9, "max_steps": steps}
        return sum(functions_called(lambda: fit(tmp_path, Net(), ours, **options)).values())

    for ours_first in (True, False):
        calls(3, ours_first)  # what the first run of a process imports does not count
    ours, theirs = (calls(15, ours) - calls(9, ours) for ours in (True, False))
    assert ours < theirs * 0.6, "of Lightning's own loop"


@pytest.mark.parametrize("clips", ["configure_gradient_clipping", "clip_gradients", "limit"])
def test_a_gradient_is_clipped_by_a_limit_or_by_the_module(tmp_path: Path, clips: str) -> None:
    class Custom(Net):
        requests = 0

    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        self.requests += 1

    setattr(Custom, "clip_gradients" if clips == "limit" else clips, method)
    module = Custom()
    trainer, _ = fit(tmp_path, module, ours=True, max_epochs=1, gradient_clip_val=0.1 if clips == "limit" else None)
    assert module.requests == trainer.global_step == 3


def test_a_precision_keeps_its_class_and_its_attributes(tmp_path: Path) -> None:
    """Checkpoints have its state under its class's name."""
    plugin = scaled()
    trainer, _ = fit(tmp_path, Net(), ours=True, max_epochs=1, plugins=[plugin])
    used = trainer.precision_plugin
    assert isinstance(used, MixedPrecision)
    assert (type(used).__qualname__, used.scaler) == ("MixedPrecision", plugin.scaler)
    assert type(plugin) is MixedPrecision, "the given object does not change"


class Doubles(MixedPrecision):
    """A user's precision, which doubles the loss that the backward pass gets."""

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        return super().pre_backward(tensor, module) * 2


def test_a_custom_precision_is_used(tmp_path: Path) -> None:
    def trained(kind: type[MixedPrecision], ours: bool) -> torch.Tensor:
        module = Loud([])
        fit(tmp_path, module, ours, max_epochs=1, plugins=[kind("bf16-mixed", "cpu")])
        return weights(module)

    assert torch.equal(trained(Doubles, True), trained(Doubles, False))
    assert not torch.equal(trained(Doubles, True), trained(MixedPrecision, True))


def test_an_optimizers_state_gets_the_memory_format_of_its_parameters() -> None:
    def optimizer(memory_format: torch.memory_format) -> torch.optim.Optimizer:
        layer = nn.Conv2d(3, 4, 2).to(memory_format=memory_format)
        made = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        layer(torch.ones(1, 3, 4, 4)).sum().backward()
        made.step()
        return made

    saved = optimizer(torch.contiguous_format)
    strategy: Any = DDP().build(Layout("single", "cpu", 1, 1, 1, 1)).strategy
    strategy.optimizers = [optimizer(torch.channels_last)]
    strategy.load_optimizer_state_dict({"optimizer_states": [saved.state_dict()]})
    (weight, state), (before, *_) = next(iter(strategy.optimizers[0].state.items())), saved.state.values()
    assert not before["momentum_buffer"].is_contiguous(memory_format=torch.channels_last), "the control"
    assert state["momentum_buffer"].stride() == weight.stride()
    assert torch.equal(state["momentum_buffer"], before["momentum_buffer"])
