"""Which value of a metric is the best: as Lockstep's models, the model or the user says, and where two contradict."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import composed
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from plain import Plain, loaders, trainer_with
from torch import nn
from torchmetrics import MaxMetric, MeanMetric, MeanSquaredError, MinMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall
from torchmetrics.wrappers import ClasswiseWrapper, Running

from lockstep.callbacks import Checkpoint
from lockstep.callbacks.monitors import MonitorCheck
from lockstep.checkpoint.callback import unlogged_metric_message
from lockstep.config.check import check
from lockstep.config.metrics import mode_of_object, modes_with_model, resolve_mode
from lockstep.data.build import open_data
from lockstep.errors import UserError
from lockstep.job.build import make_callbacks
from lockstep.job.optimizers import training_arguments


def test_the_torchmetrics_object_of_a_metric_may_say_it() -> None:
    objects: dict[Any, str | None] = {
        MulticlassAccuracy(3): "max",
        MeanSquaredError(): "min",
        MeanMetric(): None,
        MaxMetric(): "max",
        MinMetric(): "min",
        Running(MeanSquaredError()): "min",
        ClasswiseWrapper(MulticlassRecall(3, average=None), labels=["a", "b", "c"]): "max",
    }
    assert {each: mode_of_object(each) for each in objects} == objects


def test_a_mode_is_given_known_or_refused() -> None:
    def mode(metric: str, option: str | None) -> str:
        return resolve_mode("x.monitor", metric, option, "x.mode")

    assert (mode("val/loss", None), mode("val/loss", "min"), mode("val/rec", "max")) == ("min", "min", "max")
    for metric, option, message in (
        ("val/loss", "max", "x.mode=max: smaller values of val/loss are better: give x.mode=min"),
        ("val/acc", "min", "x.mode=min: larger values of val/acc are better: give x.mode=max"),
        ("val/rec", None, "x.monitor=val/rec: nothing says whether larger .* give x.mode=max or x.mode=min"),
        ("val_loss", None, "x.monitor=val_loss: nothing says whether .*"),
        ("val/top5_acc", None, "x.monitor=val/top5_acc: nothing says whether .*"),
        ("val/acc", "best", "x.mode=best: must be max or min"),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            mode(metric, option)


def test_the_model_may_state_it_of_its_metric() -> None:
    known = modes_with_model({"monitor": "val/rec", "mode": "min"})
    assert (known["val/rec"], known["val/acc"], known.get("val/other")) == ("min", "max", None)
    with pytest.raises(UserError, match=r"model\.mode=max: smaller values of val/loss"):
        modes_with_model({"monitor": "val/loss", "mode": "max"})
    own_arguments = {"monitor": "train/loss", "mode": "bilinear"}
    assert modes_with_model(own_arguments)["val/acc"] == "max"


LOSS = "callbacks.checkpoint.monitor=val/loss"
STOPPING = ("callbacks=early_stopping", "callbacks.early_stopping.monitor=val/loss")


def test_one_key_is_enough_and_the_record_has_both() -> None:
    config = check(composed(LOSS, *STOPPING, "scheduler=plateau", "scheduler.monitor=val/acc"))
    assert config.callbacks["checkpoint"]["mode"] == config.callbacks["early_stopping"]["mode"] == "min"  # type: ignore[index]
    assert config.record["callbacks"] == config.callbacks
    assert config.scheduler["mode"] == config.record["scheduler"]["mode"] == "max"  # type: ignore[typeddict-item]
    schedule = training_arguments(config, 600)["scheduler"](torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1))
    assert schedule["scheduler"].mode == "max"
    default = check(composed()).record["callbacks"]["checkpoint"]
    assert (default["monitor"], default["mode"]) == ("val/acc", "max"), "as runs have recorded it before"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ((LOSS, "callbacks.checkpoint.mode=max"), "callbacks.checkpoint.mode=max: smaller"),
        ((*STOPPING, "callbacks.early_stopping.mode=max"), "callbacks.early_stopping.mode=max: smaller"),
        (("scheduler=plateau", "scheduler.mode=max"), "scheduler.mode=max: smaller"),
        (("scheduler=plateau", "scheduler.monitor=val/acc", "scheduler.mode=min"), "scheduler.mode=min: larger"),
        (("+model.monitor=val/loss", "+model.mode=max"), "model.mode=max: smaller"),
        (
            ("+callbacks.own={_target_: lightning.pytorch.callbacks.ModelCheckpoint, monitor: val/acc, mode: min}",),
            "callbacks.own.mode=min: larger",
        ),
    ],
)
def test_a_contradiction_is_refused_when_the_config_is_checked(overrides: tuple[str, ...], key: str) -> None:
    with pytest.raises(UserError, match=f"^{key} values of "):
        check(composed(*overrides))


def callbacks_of(tmp_path: Path, module: pl.LightningModule, *overrides: str) -> list[pl.Callback]:
    raw = composed("data=synthetic", "logger=none", *overrides)
    return make_callbacks(check(raw), open_data(raw["data"], "data"), tmp_path, module)


class Scored(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.val_quality, self.val_rec = MulticlassAccuracy(2), MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_quality.update(self.layer(batch.x), batch.y)
        self.log("val/quality", self.val_quality, batch_size=1)
        self.val_rec.update(self.layer(batch.x)[:, 0], batch.y)
        self.log_dict({"val/renamed": self.val_quality, "val/acc": self.val_rec}, batch_size=1)


def test_a_callback_of_lightning_gets_the_mode_that_is_known(tmp_path: Path) -> None:
    stopping = "+callbacks.stop={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/rec}"
    saving = "+callbacks.save={_target_: lightning.pytorch.callbacks.ModelCheckpoint, monitor: val/acc}"
    made = callbacks_of(tmp_path, Scored(), "+model.monitor=val/rec", "+model.mode=max", stopping, saving)
    modes = {type(each): each.mode for each in made if isinstance(each, Checkpoint | EarlyStopping | ModelCheckpoint)}
    assert modes == dict.fromkeys((Checkpoint, EarlyStopping, ModelCheckpoint), "max"), "not Lightning's own default"
    (check_of_monitors,) = (
        each for each in callbacks_of(tmp_path, Scored(), stopping) if isinstance(each, MonitorCheck)
    )
    with pytest.raises(UserError, match=r"^callbacks\.stop\.monitor=val/rec: .* give \+callbacks\.stop\.mode=max or"):
        check_of_monitors.on_train_start(pl.Trainer(logger=False), Scored())  # no batch was evaluated before


class Follows(pl.Callback):
    """A user's callback, which knows itself which value is the best."""

    def __init__(self, monitor: str) -> None:
        self.monitor = monitor


def test_a_callback_that_takes_no_mode_gets_none(tmp_path: Path) -> None:
    follows = f"+callbacks.follows={{_target_: {__name__}.Follows, monitor: val/acc}}"
    assert [each.monitor for each in callbacks_of(tmp_path, Scored(), follows) if isinstance(each, Follows)] == [
        "val/acc"
    ]


@pytest.mark.parametrize("patience", ["callbacks.early_stopping.patience=-1", "scheduler.patience=-1"])
def test_a_negative_patience_is_refused(tmp_path: Path, patience: str) -> None:
    overrides = ("callbacks=early_stopping", "scheduler=plateau", patience)
    build: partial[Any] = partial(callbacks_of, tmp_path, Plain(), *overrides)
    if patience.startswith("scheduler"):
        build = partial(training_arguments, check(composed(*overrides)), 600)
    with pytest.raises(UserError, match=f"^{patience}: must be at least 0"):
        build()


class Falls(Scored):
    """A user's schedule, with torch's default mode, min."""

    def __init__(self, monitor: str) -> None:
        super().__init__()
        self.monitor = monitor

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": self.monitor}}


@pytest.mark.parametrize(
    ("module", "monitor", "mode", "message"),
    [
        (
            Falls("val/quality"),
            "val/quality",
            "max",
            "configure_optimizers: the monitor of its lr_scheduler=val/quality",
        ),
        (Scored(), "val/quality", "min", "stop.monitor=val/quality with mode=min: larger .* give stop.mode=max"),
        (Scored(), "val/renamed", "min", "stop.monitor=val/renamed with mode=min: larger .* give stop.mode=max"),
        (Scored(), "val/acc", "max", "stop.monitor=val/acc with mode=max: smaller .*: log it under another name"),
        (Scored(), "val/quality", "max", None),
    ],
    ids=["schedule", "attribute", "logged object", "misleading name", "control"],
)
def test_what_is_made_in_code_is_checked_before_the_first_step(
    tmp_path: Path, module: pl.LightningModule, monitor: str, mode: str, message: str | None
) -> None:
    """The names are those of attributes, or the module logs the object itself under another name."""
    stop = EarlyStopping(monitor, mode=mode)
    checks = MonitorCheck({"stop": stop}, "configure_optimizers: the monitor of its lr_scheduler")
    trainer = trainer_with(tmp_path, stop, checks)
    if message is None:
        trainer.fit(module, **loaders())
        return
    with pytest.raises(UserError, match=f"^{message}"):
        trainer.fit(module, **loaders())
    assert trainer.global_step == 0


def test_messages_that_name_a_metric_name_its_direction() -> None:
    key = "callbacks.checkpoint.monitor"
    for logged, end in (
        (["val/rec"], f"give {key}=val/rec callbacks.checkpoint.mode=max or min"),
        (["val/loss"], f"give {key}=val/loss callbacks.checkpoint.mode=min (smaller is better)"),
        (["val/acc"], f"give {key}=val/acc callbacks.checkpoint.mode=max (larger is better)"),
    ):
        assert unlogged_metric_message(key, "val/x", logged, has_mode=True).endswith(end)
