"""What a run records of its config, and that other programs build the same module from it."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from conftest import composed
from small_data import arrays, splits
from torch import nn

from lockstep.config.check import Config, check
from lockstep.errors import UserError
from lockstep.job.build import make_module
from lockstep.job.optimizers import as_built
from lockstep.vision.callbacks.dashboard import Dashboard


class Net(nn.Module):
    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.lr = lr


class Lit(pl.LightningModule):
    """A module that makes its own optimizer."""

    def __init__(self, net: Any = None, lr: float = 3e-3) -> None:
        super().__init__()
        self.net, self.lr = net, lr


class WithoutLr(pl.LightningModule):
    def __init__(self, optimizer: Any = None, net: Any = None) -> None:
        super().__init__()
        self.optimizer, self.net = optimizer, net


class NeedsLr(pl.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr


class MakesOptimizer(pl.LightningModule):
    def __init__(self, scheduler: Any = None, lr: float = 3e-3, learning_rate: float = 0.7) -> None:
        super().__init__()
        self.scheduler, self.lr = scheduler, lr


class Plain(pl.LightningModule):
    def __init__(self, learning_rate: float = 0.7) -> None:
        super().__init__()


NET = {"_target_": f"{__name__}.Net"}
ADAM = {"_target_": "torch.optim.Adam", "_partial_": True}


def config_of(kind: type, options: dict[str, Any], *overrides: str) -> Config:
    model = {"name": "mine", "_target_": f"{__name__}.{kind.__name__}", **options}
    raw = {**composed("max_epochs=2", "batch_size=8", *overrides), "model": model}
    return check(raw, overridden=[each.partition("=")[0] for each in overrides])


def built(config: Config) -> Any:
    return make_module(config, splits(arrays(32)))


def received(module: Any) -> list[Any]:
    """Return the learning rates that a module and its parts have got."""
    made = getattr(module, "optimizer", None)
    parts = [
        module,
        getattr(module, "net", None),
        SimpleNamespace(**made.keywords) if isinstance(made, partial) else None,
    ]
    return [getattr(part, "lr", None) for part in parts]


@pytest.mark.parametrize(
    ("kind", "options", "overrides", "expected", "lr"),
    [
        (Lit, {}, [], 3e-3, 3e-3),
        (Lit, {}, ["lr=0.001"], 1e-3, 1e-3),
        (Lit, {}, ["lr=0.02"], 0.02, 0.02),  # the optimizer's page has the same
        (Lit, {}, ["lr=0.001", "lr_scaling=linear", "reference_batch_size=4"], 2e-3, 2e-3),
        (Lit, {"lr": 0.1}, [], 0.1, 0.1),
        (Lit, {"net": NET}, [], 3e-3, 3e-3),  # and the network's default
        (Lit, {"net": NET}, ["lr=0.001"], 1e-3, 1e-3),
        (Lit, {"net": {**NET, "lr": "later:lr"}}, [], 3e-3, 3e-3),
        (NeedsLr, {}, [], 0.02, 0.02),
        (WithoutLr, {"optimizer": ADAM}, [], None, None),
        (WithoutLr, {"optimizer": ADAM, "net": NET}, ["lr=0.001"], None, None),  # set by an experiment
        (MakesOptimizer, {}, [], 3e-3, 3e-3),
        (Plain, {}, [], None, None),
    ],
)
def test_a_record_builds_the_module_that_ran_whatever_keys_the_user_had_set(
    kind: type, options: dict[str, Any], overrides: list[str], expected: Any, lr: Any
) -> None:
    config = replace(config_of(kind, options, *overrides), overridden=())  # an experiment may set a key in vain
    assert config.requested == {each.partition("=")[0] for each in overrides}
    record = as_built(config.record, config)
    again = check(record)
    assert received(built(config)) == received(built(again))
    assert getattr(built(config), "lr", None) == expected
    assert record.get("lr") == lr
    assert as_built(again.record, again) == record == again.record, "the same record, run after run"
    assert record["optimizer"] == {"_target_": None}, "what did not run is not recorded"
    if not hasattr(built(config), "scheduler"):
        assert record["scheduler"] == {"_target_": None}


def test_a_scheduler_of_the_config_keeps_its_values_in_a_module_with_a_default_lr() -> None:
    config = config_of(MakesOptimizer, {})
    schedule: Any = {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": "later:lr", "total_steps": 9}
    config = replace(config, scheduler=schedule, record={**config.record, "scheduler": schedule})
    again = check(as_built(config.record, config))
    makers = [built(each).scheduler.make.keywords["max_lr"] for each in (config, again)]
    assert makers == [0.02, 0.02]


@pytest.mark.parametrize("overrides", [[], ["model=resnet18"], ["model=torchvision", "model.arch=resnet18"]])
def test_the_record_of_a_module_that_takes_the_run_s_optimizer_is_the_whole_config(overrides: list[str]) -> None:
    config = check(composed(*overrides), overridden=["lr"])
    assert as_built(config.record, config) == config.record


def test_a_module_that_takes_an_optimizer_needs_one() -> None:
    config = check({**composed("batch_size=8"), "optimizer": {"_target_": None}})
    with pytest.raises(UserError, match=r"^optimizer: project\.models\.MnistCNN takes one, .*: give optimizer=sgd"):
        built(config)


def test_hyperparameters_of_the_module_and_of_the_config_do_not_share_a_name_with_two_values() -> None:
    sent: list[dict[str, Any]] = []
    logger = SimpleNamespace(log_hyperparams=sent.append)
    trainer: Any = SimpleNamespace(is_global_zero=True, loggers=[logger], global_step=0)
    module = Lit()
    module.save_hyperparameters({"batch_size": 16, "lr": 3e-3})
    Dashboard({"batch_size": 64, "lr": 3e-3, "seed": 0}, "").on_train_start(trainer, module)
    assert sent == [{"run.batch_size": 64, "lr": 3e-3, "seed": 0}]
