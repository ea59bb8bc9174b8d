"""The optimizer and the schedule that a config names, as a module gets them: what makes them, `functools.partial`s."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.arithmetic.order import DataOrder
from lockstep.checkpoint.io import is_plain
from lockstep.config.check import Config
from lockstep.config.checks import matching
from lockstep.config.instantiate import call, instantiate, locate, parameters
from lockstep.config.schema import Scheduler
from lockstep.errors import UserError
from lockstep.run.length import length_of
from lockstep.text import plural

RATES = ("max_lr", "base_lr", "min_lr")  # of torch's schedulers, which take a list of them too
# Keys of the front page that do nothing where a module's constructor takes none of these arguments.
OFFERED = dict.fromkeys(("lr", "lr_scaling", "reference_batch_size"), ("lr", "optimizer")) | {
    "optimizer": ("optimizer",),
    "scheduler": ("scheduler",),
}
ONE = (
    "a step has one; what is trained otherwise is a parameter group of it, what is not trained is frozen by "
    "requires_grad_(False)"
)


class Factory:
    """Makes an optimizer, or Lightning's `lr_scheduler` dict where there are keys `beside`, from a config's options.

    Attributes:
        settings: all options with their values in this run, plain: what a checkpoint records.
        called: whether the module has made something with it.
        named: the module's `named_parameters`, of which `lr_scale` speaks.
    """

    def __init__(
        self,
        key: str,
        make: partial[Any],
        beside: Mapping[str, Any] | None = None,
        lr_scale: Mapping[str, float] | None = None,
    ) -> None:
        self.key, self.make, self.beside = key, make, beside
        self.lr_scale: dict[str, float] = dict(lr_scale or {})
        self.called = False
        self.named: Callable[[], Iterable[tuple[str, nn.Parameter]]] = lambda: ()
        options = {name: value if is_plain(value) else type(value).__name__ for name, value in make.keywords.items()}
        self.settings = {"_target_": f"{make.func.__module__}.{make.func.__name__}", **options, **(beside or {})}
        if self.lr_scale:
            self.settings["lr_scale"] = self.lr_scale

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        if self.beside is None:
            made = call(self.key, partial(self.make, **kwargs), *args)
            if self.lr_scale:
                made.param_groups = self._scaled(made.param_groups)
            return made
        make = partial(self.make, **self._by_group(kwargs.get("optimizer", *args[:1])), **kwargs)
        return {"scheduler": call(self.key, make, *args), **self.beside}

    def _scaled(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups, each cut in those of one pattern, with its part of the learning rate."""
        names = {id(parameter): name for name, parameter in self.named()}
        try:
            patterns = matching(self.lr_scale, list(names.values()))
        except ValueError as error:
            raise UserError(f"{self.key}.lr_scale: {error}") from error
        found = []
        for group in groups:
            of = [patterns.get(names.get(id(parameter), "")) for parameter in group["params"]]
            for pattern in dict.fromkeys(of):
                scale = 1.0 if pattern is None else self.lr_scale[pattern]
                part = {**group, "lr": group["lr"] * scale, "lr_scale": scale}
                for name in {"params", "param_names"} & group.keys():
                    part[name] = [each for each, its in zip(group[name], of, strict=True) if its == pattern]
                found.append(part)
        return found

    def _by_group(self, optimizer: Any = None) -> dict[str, list[float]]:
        """Options of a schedule that are learning rates, and would be all groups' alike: OneCycleLR's max_lr, say."""
        scales = [group.get("lr_scale") for group in getattr(optimizer, "param_groups", [{}])]
        rates = [] if None in scales else [n for n in RATES if isinstance(self.make.keywords.get(n), int | float)]
        return {name: [self.make.keywords[name] * scale for scale in scales] for name in rates}


def steps_per_epoch(config: Config, samples: int) -> int:
    """Optimizer steps of one pass over the training set."""
    return DataOrder(samples, config.layout, config.seed).steps_per_epoch


def total_steps(config: Config, samples: int) -> int:
    """Optimizer steps of the whole run; of an evaluation, which has no schedule, as many as any warm-up has."""
    if not config.trains:
        return sys.maxsize
    return length_of(config, samples).steps


def smallest_piece(config: Config, samples: int) -> int:
    """Samples of the smallest piece that a run trains on: a short last step's, where it comes to one."""
    size, pieces = config.layout.batch_size, config.layout.pieces
    tail = samples % size if config.trains and total_steps(config, samples) >= steps_per_epoch(config, samples) else 0
    return min(max(1, step // pieces) for step in (size, tail or size))


def optimization(config: Config, samples: int) -> dict[str, Any]:
    """What a module is offered to train with: `lr`, `optimizer`, `scheduler`, `total_steps`, `steps_per_epoch`.
    An evaluation has neither optimizer nor scheduler."""
    numbers: dict[str, Any] = {
        "lr": config.step_lr,
        "total_steps": total_steps(config, samples),
        "steps_per_epoch": steps_per_epoch(config, samples),
    }
    if not config.trains:
        return {**numbers, "optimizer": None, "scheduler": None}
    named: dict[str, Any] = {**config.optimizer, "_partial_": True}
    scale = named.pop("lr_scale", None)
    optimizer = Factory("optimizer", instantiate("optimizer", named, **numbers), lr_scale=scale)
    trial = call("optimizer", optimizer.make, [nn.Parameter(torch.zeros(1))])  # refuses values before any work
    scheduler = None
    if config.scheduler:
        beside = {name: value for name, value in config.scheduler.items() if name in Scheduler.__annotations__}
        options = {name: value for name, value in config.scheduler.items() if name not in beside}
        scheduler = Factory("scheduler", instantiate("scheduler", {**options, "_partial_": True}, **numbers), beside)
        if isinstance(call("scheduler", scheduler.make, trial), ReduceLROnPlateau):
            _must_be_known(beside, config.val_every, numbers["steps_per_epoch"])
    return {**numbers, "optimizer": optimizer, "scheduler": scheduler}


def _must_be_known(beside: Mapping[str, Any], val_every: int | None, epoch: int) -> None:
    """UserError: a schedule follows no metric, or one that is not known yet when it does."""
    monitor, interval = str(beside.get("monitor", "")), beside.get("interval", "epoch")
    if not monitor:
        raise UserError("scheduler: ReduceLROnPlateau follows a metric: give +scheduler.monitor=val/loss, say")
    if monitor.startswith("train/") and interval == "step":
        raise UserError(f"scheduler.monitor={monitor} is known at an epoch's end: scheduler.interval=epoch")
    follows, known = beside.get("frequency", 1) * (epoch if interval == "epoch" else 1), val_every or epoch
    if monitor.startswith("val") and follows < known:
        every = plural(follows, "step")
        raise UserError(
            f"scheduler.interval={interval}: {monitor} would be followed every {every}, and is known every {known} "
            f"only; give {'scheduler.interval=epoch or ' * (follows < epoch)}val_every={follows}"
        )


def settings(config: Config, samples: int) -> dict[str, Any]:
    """What a module's optimizer and schedule follow from, plain: of what it is offered, the part that it takes."""
    takes = parameters(locate("model._target_", config.model["_target_"])) - {"steps_per_epoch"}
    offers = {name: offer for name, offer in optimization(config, samples).items() if name in takes}
    return {name: offer.settings if isinstance(offer, Factory) else offer for name, offer in offers.items()}


def refuse_unused(config: Config) -> None:
    """UserError: a key was given that the module's constructor has no argument for, or whose argument the model's file
    gives."""
    target = config.model["_target_"]
    takes = parameters(locate("model._target_", target))
    for key in config.given:
        group = key.partition(".")[0]
        if group not in OFFERED or takes.difference(config.model).intersection(OFFERED[group]):
            continue
        if own := [name for name in OFFERED[group] if name in takes]:
            raise UserError(
                f"{key}: the model has its own {own[0]}, so this would change nothing: model.{own[0]} changes it"
            )
        raise UserError(
            f"{key}: {target} takes no {OFFERED[group][0]}, so this would change nothing; leave it out, or give "
            f"its constructor a parameter {OFFERED[group][0]}"
        )


class OptimizerCheck(pl.Callback):
    """Refuses, before the first step, a module without an optimizer or with several, and keys that none follows."""

    def __init__(self, config: Config) -> None:
        self.target = config.model["_target_"]
        self.given = config.given

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not any(optimizer.param_groups for optimizer in trainer.optimizers):
            raise UserError(f"configure_optimizers returned no optimizer: {ONE}")
        ignored = {made.key for made in vars(pl_module).values() if isinstance(made, Factory) and not made.called}
        for key in self.given:
            if key.partition(".")[0] in ignored:
                raise UserError(
                    f"{key}: the configure_optimizers of {self.target} does not use self.{key.partition('.')[0]}, so "
                    "this would change nothing; leave it out"
                )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if "multiple optimizers" in str(exception):  # Lightning's, which advises to step them by hand
            raise UserError(f"configure_optimizers returned several optimizers: {ONE}") from exception
