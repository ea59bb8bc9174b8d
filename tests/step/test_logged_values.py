"""What `self.log` gives in training and evaluation: one value on all ranks and layouts, and what can follow it."""

import math
import random
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from rank_fits import Net, Saves, fits, going_on, saving
from thread_ranks import Ranks
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lockstep.arithmetic.exact_total import ExactTotal
from lockstep.callbacks.ranks import Diverged, ReplicaConsistencyCheck
from lockstep.checkpoint.io import load
from lockstep.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")

# With 26 samples an epoch has steps of 12, 12 and 2: a rank of three has no sample in the last one.
LAYOUTS: list[dict[str, Any]] = [
    {"world": 1},
    {"world": 3},
    {"world": 2, "strategy": "dp"},
    {"world": 2, "strategy": "fsdp"},
]
OPTIONS: dict[str, Any] = {"train": 26, "max_epochs": 2, "limit_val_batches": 0}


# --- exact totals -----------------------------------------------------------------------------------------------------


def test_a_total_does_not_depend_on_the_order() -> None:
    draw = random.Random(0)
    numbers = [draw.uniform(-1, 1) * 2.0 ** draw.randint(-1040, 900) for _ in range(500)]
    numbers += [0.0, 5e-324, 1e308, -1e308]
    expected = sum(map(Fraction, numbers))
    for parts in (1, 7):
        draw.shuffle(numbers)
        total = ExactTotal()
        for part in range(parts):
            one = ExactTotal()
            one.add(numbers[part::parts])
            total.merge(one)
        assert Fraction(total.units) * Fraction(2) ** -1126 == expected
        assert total.over(3) == float(expected / 3)
    alone = ExactTotal()
    for number in numbers:
        alone.add([number])
    assert alone.units == total.units


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([math.inf, 1.0], math.inf), ([math.inf, -math.inf], math.nan), ([math.nan], math.nan), ([], 0.0)],
)
def test_a_total_of_what_is_not_finite(numbers: list[float], expected: float) -> None:
    total = ExactTotal()
    total.add(numbers)
    assert total.over(2.0) == expected or (math.isnan(expected) and math.isnan(total.over(2.0)))
    assert math.isnan(total.over(0))


# --- one value on all layouts -----------------------------------------------------------------------------------------


class Logs(Net):
    """Logs in each way, and reads it."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.accuracy = MulticlassAccuracy(3)
        self.read: list[tuple[float, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        p = self(x)
        loss = F.cross_entropy(p, y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=batch_idx > 5)
        self.log("largest", p.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("smallest", p.min(), on_step=False, on_epoch=True, reduce_fx=min)
        self.log("right", (p.argmax(1) == y).sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log_dict({"one": 1, "small": loss * 1e-30}, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=int(y.sum()) + 1)
        self.accuracy(p, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("number", float(batch_idx), on_step=True, on_epoch=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.read.append(tuple(float(self.trainer.callback_metrics[name]) for name in ("loss_step", "right_step")))

    def on_train_batch_end(self, *args: Any) -> None:
        self.read.append((float(self.trainer.logged_metrics["loss_step"]),))

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.trainer.current_epoch))


def test_what_training_logs_has_the_bits_of_one_device(ranks: Ranks) -> None:
    net = Logs()
    [one] = fits(ranks, net, 1, **OPTIONS)
    read = one.trainer.lightning_module.read
    assert one.metrics["number_epoch"] == pytest.approx((0 * 12 + 1 * 12 + 2 * 2) / 26)
    assert one.metrics["epoch"] == 1.0
    assert len({each for each in read if len(each) == 1}) == 6, "each of six steps has its own value"
    for layout in LAYOUTS[1:]:
        for each in fits(ranks, net, **layout, **OPTIONS):
            assert each.metrics == one.metrics, layout
            assert each.trainer.lightning_module.read == read, layout


def test_a_steps_value_is_that_of_all_its_samples(ranks: Ranks) -> None:
    """Against a plain loop over the pieces."""

    class Constant(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            value = batch[0].double().mean()
            values.setdefault((self.trainer.global_step, float(value)), len(batch[1]))
            self.log("mean", value, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    values: dict[tuple[int, float], int] = {}
    for result in fits(ranks, Constant(norm=False), 2, train=26, pieces=4, limit_val_batches=0):
        means = [
            math.fsum(value * size for (step, value), size in values.items() if step in steps)
            / sum(size for (step, _), size in values.items() if step in steps)
            for steps in ((2,), (0, 1, 2))
        ]
        assert [result.metrics[f"mean_{what}"] for what in ("step", "epoch")] == pytest.approx(means, rel=1e-15)


class LogsLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class Follows(LogsLoss):
    interval = "epoch"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.02)
        monitor = f"train_loss_{self.interval}"
        return [optimizer], [{"scheduler": plateau, "monitor": monitor, "interval": self.interval}]


class FollowsSteps(Follows):
    interval = "step"


@pytest.mark.parametrize(("kind", "epochs"), [(Follows, 6), (FollowsSteps, 2), (LogsLoss, 12)])
def test_what_follows_training_decides_the_same_on_all_layouts(ranks: Ranks, kind: type[LogsLoss], epochs: int) -> None:
    """Schedules, and early stopping."""
    net, ends = kind(norm=False, dropout=0.5), set()
    stops: Any = lambda: [EarlyStopping("train_loss_epoch", patience=1, min_delta=0.05)] * (kind is LogsLoss)  # noqa: E731
    for layout in LAYOUTS[:2]:
        for each in fits(ranks, net, **layout, **{**OPTIONS, "max_epochs": epochs}, callbacks_of=stops):
            rate = each.trainer.optimizers[0].param_groups[0]["lr"]
            ends.add((each.trainer.global_step, rate, each.metrics["train_loss_epoch"]))
    [(step, rate, _)] = ends
    if kind is LogsLoss:
        assert 3 < step < 3 * epochs, "the control: it has stopped"
    else:
        assert rate < 0.5, "the control: the rate has changed"


class Bar(Callback):
    """Reads, on rank zero alone, what a progress bar shows."""

    def __init__(self) -> None:
        self.shown: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.shown.append(float(trainer.progress_bar_metrics["train/acc"]))


class Counts(Net):
    """Shows a torchmetrics object in the progress bar, and logs another one before it."""

    def __init__(self) -> None:
        super().__init__(norm=False, dropout=0.0)
        self.mean, self.accuracy = MeanMetric(), MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.mean(loss.detach())
        self.accuracy(logits.detach(), batch[1])
        self.log("train/loss", self.mean, on_step=False, on_epoch=True)
        self.log("train/acc", self.accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return loss


def test_a_progress_bar_reads_metrics_on_rank_zero_alone(ranks: Ranks) -> None:
    bars = Bar(), Bar()
    for world, bar in enumerate(bars, 1):
        fits(ranks, Counts(), world, **OPTIONS, callbacks_of=partial(list, [bar]))
    assert bars[0].shown == bars[1].shown
    assert len(bars[0].shown) == 2


def test_nothing_is_sent_in_steps_in_which_nothing_reads(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.lightning import logs

    class Reading(LogsLoss):
        def on_train_batch_end(self, *args: Any) -> None:
            assert "train_loss_step" in self.trainer.callback_metrics

    steps: list[int] = []
    reduce_step = logs.StepLogs.reduce_step

    def counted(self: Any, early: bool = False) -> None:
        if not early:
            steps.append(self.trainer.global_step)
        reduce_step(self, early)

    monkeypatch.setattr(logs.StepLogs, "reduce_step", counted)
    for kind, expected in ((LogsLoss, {6}), (Reading, {1, 2, 3, 4, 5, 6})):
        steps.clear()
        fits(ranks, kind(), 2, train=30, batch_size=6, pieces=3, max_epochs=1, limit_val_batches=0, max_steps=6)
        assert {*steps} - {0} >= expected - {6}
        assert ({*steps} == {5}) is (kind is LogsLoss)


# --- what differs between ranks ---------------------------------------------------------------------------------------


class Gathers(Net):
    """Keeps values in lists, as many programs do."""

    synced = False

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.values.append(F.cross_entropy(self(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", torch.stack(self.values).mean(), sync_dist=self.synced)
        self.values.clear()


class GathersSynced(Gathers):
    synced = True


class GathersInTraining(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mean = outputs["loss"]

    def on_train_epoch_end(self) -> None:
        self.log("val_mean", self.mean)


class LogsOutputs(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_mean", outputs["loss"], on_epoch=True)


class LogsRank(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("val_mean", self.global_rank)


class LogsOnRankZero(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 0:
            self.log("val_mean", loss, on_epoch=True)
        return loss


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (Gathers, "on_validation_epoch_end"),
        (GathersSynced, "on_validation_epoch_end"),
        (GathersInTraining, "on_train_epoch_end"),
        (LogsOutputs, "on_train_batch_end"),
        (LogsRank, "on_train_batch_start"),
        (LogsOnRankZero, "training_step"),
    ],
)
def test_what_differs_between_ranks_is_named_and_not_followed(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, kind: type[Net], place: str
) -> None:
    net: Any = kind()
    options: dict[str, Any] = {"evaluated": 20, "num_sanity_val_steps": 0}
    fits(ranks, net, 2, **options)
    step = "validation_step" if "validation" in place else "training_step"
    differs = f"val_mean, logged in {place}, differs between ranks"
    assert f"{differs} and is reported as their mean, weighted by samples: to get the value of one" in caplog.text
    follows: dict[str, Any] = {"callbacks_of": lambda: [EarlyStopping("val_mean", strict=False)], **options}
    for error in fits(ranks, net, 2, errors=UserError, **follows):
        assert str(error) == (
            f"EarlyStopping(monitor='val_mean') can't follow this value, since {differs}: to get the value of one "
            f"device, log it in {step}, or log a torchmetrics metric"
        )
    fits(ranks, net, 1, **follows)  # one rank can't differ


@pytest.mark.parametrize(
    ("step", "changes", "message"),
    [
        (2, "lr", "after step 2 the optimizer's lr (0.1, 0.2) of rank 1 differ from those of rank 0"),
        (4, "weights", "after step 4 the weights of rank 1 differ from those of rank 0"),
        (3, "momentum", "after step 4 the optimizer's momentum (0.9, 0.5) of rank 1 differ from those of rank 0"),
    ],
)
def test_ranks_that_differ_are_noticed_without_validation_and_checkpoints(
    ranks: Ranks, step: int, changes: str, message: str
) -> None:
    class Changes(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            [group] = self.trainer.optimizers[0].param_groups
            if self.trainer.global_step == step and self.global_rank:
                if changes == "weights":
                    group["params"][0].data[0, 0] += 2.0**-20
                else:
                    group[changes] = {"lr": 0.2, "momentum": 0.5}[changes]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    options: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0}
    for error in fits(
        ranks, Changes(), 2, callbacks_of=lambda: [ReplicaConsistencyCheck()], errors=Diverged, **options
    ):
        assert str(error) == message


# --- weights ----------------------------------------------------------------------------------------------------------


def test_a_mean_is_weighted_by_the_samples_of_a_batch_whatever_its_shape(ranks: Ranks) -> None:
    """Lightning takes the first dimension of the first tensor for the number of samples."""

    class Reshapes(Net):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch
            return {"size": torch.tensor([len(y)] * 3), "x": x[None], "y": [y]}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, [y] = batch["x"][0], batch["y"]
            self.log("train_y", y.double().mean(), on_step=True, on_epoch=True)
            return F.cross_entropy(self(x), y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_y", batch["y"][0].double().mean())

    net = Reshapes(norm=False)
    for world in (1, 2):
        for each in fits(ranks, net, world, train=26, evaluated=22, pieces=2):
            assert each.metrics["train_y_epoch"] == pytest.approx(sum(n % 3 for n in range(26)) / 26, rel=1e-12)
            assert each.metrics["val_y"] == pytest.approx(sum(n % 3 for n in range(22)) / 22, rel=1e-12)


def test_a_pass_that_is_repeated_counts_once(ranks: Ranks) -> None:
    """As LBFGS repeats the passes of a step."""

    class Repeats(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("samples", float(len(batch[1])), reduce_fx="sum", on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)

    for world in (1, 2):
        for each in fits(ranks, Repeats(norm=False, dropout=0.0), world, train=26, limit_val_batches=0):
            assert (each.metrics["samples_step"], each.metrics["samples_epoch"]) == (2, 26)


# --- limits of batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 0.5])
def test_a_limit_of_batches_evaluates_the_same_samples_on_all_layouts(ranks: Ranks, limit: float) -> None:
    net = Net(norm=False)
    limited, whole = (
        {
            each.metrics["val/loss"]
            for world in (1, 3)
            for each in fits(ranks, net, world, evaluated=25, batch_size=6, pieces=3, limit_val_batches=number)
        }
        for number in (limit, 1.0)
    )
    assert len(limited) == len(whole) == 1
    assert limited != whole


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_the_mean_of_an_epoch_goes_on_after_a_resume_on_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    class LogsMore(LogsLoss):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.log("number", float(batch_idx), on_step=False, on_epoch=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.trainer.global_step != 4:  # it is not logged between the two checkpoints
                self.log("seldom", loss, on_step=False, on_epoch=True)
            return loss

    net, file, again = LogsMore(norm=False), tmp_path / "cut.ckpt", tmp_path / "again.ckpt"
    [one] = fits(ranks, net, 1, **saving(file, step=4), **OPTIONS)
    assert load(file)["loops"]["fit_loop"]["epoch_loop.state_dict"]["logged"]
    for layout in LAYOUTS[:3]:
        # the last epoch has one more step, in which rank zero of three has no sample
        first = fits(ranks, net, **layout, **going_on(file), **OPTIONS, callbacks=[Saves(again, step=5)])
        for each in [*first, *fits(ranks, net, **layout, **going_on(again), **OPTIONS)]:
            assert each.metrics == one.metrics
