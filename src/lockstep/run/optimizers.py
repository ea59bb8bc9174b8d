"""Make the factories with which a module builds the optimizer and the schedule that a config names."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.arithmetic.order import DataOrder
from lockstep.checkpoint.io import is_plain
from lockstep.config.check import Config
from lockstep.config.instantiate import call, instantiate, locate, parameters
from lockstep.config.schema import Scheduler
from lockstep.errors import UserError
from lockstep.run.run_length import run_length
from lockstep.text import plural

# A key of train.yaml -> the constructor arguments of a module that it reaches. It has no effect without them.
OFFERED = dict.fromkeys(("lr", "lr_scaling", "reference_batch_size"), ("lr", "optimizer")) | {
    "optimizer": ("optimizer",),
    "scheduler": ("scheduler",),
}
ONE = (
    "return one, with a parameter group for each part that is trained differently; freeze parameters with "
    "requires_grad_(False)"
)


class ParameterGroups(Protocol):
    """The class that `optimizer.param_groups` names. It is built, with `lr_scale`, if the config gives `lr_scale`."""

    def divide(
        self, groups: Sequence[dict[str, Any]], named: Iterable[tuple[str, nn.Parameter]]
    ) -> list[dict[str, Any]]:
        """Return an optimizer's new groups, made from its groups and the module's `named_parameters()`."""

    def schedule(self, options: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the options of a schedule that differ between these groups, each as a list."""


class Factory:
    """Makes an optimizer, or Lightning's `lr_scheduler` dict, from a config's options.

    Args:
        key: the config group, for error messages.
        make: the optimizer's or schedule's class with its options.
        beside: the keys of the `lr_scheduler` dict beside `scheduler`; None: this makes an optimizer.
        groups: divides the optimizer's parameter groups.

    Attributes:
        settings: all options with their values in this run, as plain data for checkpoints.
        called: whether the module has called it.
        named: the module's `named_parameters`, which `groups` needs.
    """

    def __init__(
        self,
        key: str,
        make: partial[Any],
        beside: Mapping[str, Any] | None = None,
        groups: ParameterGroups | None = None,
    ) -> None:
        self.key, self.make, self.beside, self.groups = key, make, beside, groups
        self.called = False
        self.named: Callable[[], Iterable[tuple[str, nn.Parameter]]] = lambda: ()
        options = {name: value if is_plain(value) else type(value).__name__ for name, value in make.keywords.items()}
        self.settings = {"_target_": f"{make.func.__module__}.{make.func.__name__}", **options, **(beside or {})}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        if self.beside is None:
            made = call(self.key, partial(self.make, **kwargs), *args)
            if self.groups:
                made.param_groups = self.groups.divide(made.param_groups, self.named())
            return made
        if self.groups:
            optimizer = kwargs.get("optimizer", *args[:1])
            kwargs = self.groups.schedule(self.make.keywords, getattr(optimizer, "param_groups", [])) | kwargs
        return {"scheduler": call(self.key, partial(self.make, **kwargs), *args), **self.beside}


def steps_per_epoch(config: Config, samples: int) -> int:
    """Return the optimizer steps of one pass over the training set."""
    return DataOrder(samples, config.layout, config.seed).steps_per_epoch


def total_steps(config: Config, samples: int) -> int:
    """Return the optimizer steps of the whole run; of an evaluation, more than any warm-up has."""
    if not config.trains:
        return sys.maxsize
    return run_length(config, samples).steps


def smallest_piece(config: Config, samples: int) -> int:
    """Return the samples of the smallest piece that a run trains on; a short last step has smaller ones."""
    size, pieces = config.layout.batch_size, config.layout.pieces
    tail = samples % size if config.trains and total_steps(config, samples) >= steps_per_epoch(config, samples) else 0
    return min(max(1, step // pieces) for step in (size, tail or size))


def optimization(config: Config, samples: int) -> dict[str, Any]:
    """Return the arguments about training that a module's constructor may take.

    These are `lr`, `optimizer`, `scheduler`, `total_steps` and `steps_per_epoch`. In an evaluation `optimizer` and
    `scheduler` are None.

    Raises:
        UserError: The optimizer or the schedule can't be made with these options.
    """
    numbers: dict[str, Any] = {
        "lr": config.step_lr,
        "total_steps": total_steps(config, samples),
        "steps_per_epoch": steps_per_epoch(config, samples),
    }
    if not config.trains:
        return {**numbers, "optimizer": None, "scheduler": None}
    named: dict[str, Any] = {**config.optimizer, "_partial_": True}
    maker, scale, groups = named.pop("param_groups", None), named.pop("lr_scale", None), None
    if scale:
        if not maker:
            raise UserError("optimizer.lr_scale has no effect without optimizer.param_groups: give both")
        groups = instantiate("optimizer.param_groups", maker, lr_scale=scale)
    optimizer = Factory("optimizer", instantiate("optimizer", named, **numbers), groups=groups)
    optimizer.settings |= {"lr_scale": scale} if scale else {}
    trial = call("optimizer", optimizer.make, [nn.Parameter(torch.zeros(1))])  # refuse bad values early
    scheduler = None
    if config.scheduler:
        beside = {name: value for name, value in config.scheduler.items() if name in Scheduler.__annotations__}
        options = {name: value for name, value in config.scheduler.items() if name not in beside}
        make = instantiate("scheduler", {**options, "_partial_": True}, **numbers)
        scheduler = Factory("scheduler", make, beside, groups)
        if isinstance(call("scheduler", scheduler.make, trial), ReduceLROnPlateau):
            _check_options_known(beside, config.val_every, numbers["steps_per_epoch"])
    return {**numbers, "optimizer": optimizer, "scheduler": scheduler}


def _check_options_known(beside: Mapping[str, Any], val_every: int | None, epoch: int) -> None:
    """Check that ReduceLROnPlateau has a metric, and that the metric exists whenever the schedule reads it.

    Args:
        beside: the keys of Lightning's `lr_scheduler` dict.
        epoch: optimizer steps of an epoch.

    Raises:
        UserError: There is no metric, or validation is rarer than the schedule.
    """
    monitor, interval = str(beside.get("monitor", "")), beside.get("interval", "epoch")
    if not monitor:
        raise UserError("scheduler: ReduceLROnPlateau needs a metric: give +scheduler.monitor=val/loss, for example")
    if monitor.startswith("train/") and interval == "step":
        raise UserError(f"scheduler.monitor={monitor} is known at an epoch's end only: use scheduler.interval=epoch")
    follows, known = beside.get("frequency", 1) * (epoch if interval == "epoch" else 1), val_every or epoch
    if monitor.startswith("val") and follows < known:
        every = plural(follows, "step")
        raise UserError(
            f"scheduler.interval={interval} reads {monitor} every {every}, but it changes every {known} steps: "
            f"use {'scheduler.interval=epoch or ' * (follows < epoch)}val_every={follows}"
        )


def settings(config: Config, samples: int) -> dict[str, Any]:
    """Return the settings of the optimizer and the schedule that the module takes, as plain data."""
    takes = parameters(locate("model._target_", config.model["_target_"])) - {"steps_per_epoch"}
    offers = {name: offer for name, offer in optimization(config, samples).items() if name in takes}
    return {name: offer.settings if isinstance(offer, Factory) else offer for name, offer in offers.items()}


def refuse_unused(config: Config) -> None:
    """Refuse keys on the command line that have no effect.

    Raises:
        UserError: The module's constructor has no argument for a key, or the model's yaml file already sets it.
    """
    target = config.model["_target_"]
    takes = parameters(locate("model._target_", target))
    for key in config.overridden:
        group = key.partition(".")[0]
        if group not in OFFERED or takes.difference(config.model).intersection(OFFERED[group]):
            continue
        if model_arguments := [name for name in OFFERED[group] if name in takes]:
            raise UserError(
                f"{key} has no effect, since the model has its own {model_arguments[0]}: use model.{model_arguments[0]}"
            )
        raise UserError(
            f"{key} has no effect, since {target} takes no {OFFERED[group][0]}: leave it out, or give "
            f"its constructor a parameter {OFFERED[group][0]}"
        )


class OptimizerCheck(pl.Callback):
    """Refuses, before the first step, a module without an optimizer or with several, and keys without effect."""

    def __init__(self, config: Config) -> None:
        self.target = config.model["_target_"]
        self.overridden = config.overridden

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not any(optimizer.param_groups for optimizer in trainer.optimizers):
            raise UserError(f"configure_optimizers returned no optimizer: {ONE}")
        ignored = {made.key for made in vars(pl_module).values() if isinstance(made, Factory) and not made.called}
        for key in self.overridden:
            if key.partition(".")[0] in ignored:
                raise UserError(
                    f"{key} has no effect, since the configure_optimizers of {self.target} does not use "
                    f"self.{key.partition('.')[0]}: leave it out"
                )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if "multiple optimizers" in str(exception):  # Lightning's own message advises manual optimization
            raise UserError(f"configure_optimizers returned several optimizers: {ONE}") from exception
