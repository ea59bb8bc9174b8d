"""Make the factories with which a module builds the optimizer and the schedule that a config names."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.arithmetic.exact_sum import dense
from lockstep.checkpoint.plain import is_plain
from lockstep.config.check import Config
from lockstep.config.instantiate import LATER, call, defaults, instantiate, locate, parameters
from lockstep.config.metrics import modes_with_model, with_mode
from lockstep.config.run_length import RunLength, run_length
from lockstep.config.schema import Scheduler
from lockstep.errors import UserError
from lockstep.text import plural
from lockstep.trainer.parts import OneOptimizerCheck

# Key of train.yaml -> constructor arguments through which it acts. A module that takes none of them ignores the key.
LR_KEYS = ("lr", "lr_scaling", "reference_batch_size")
CONSTRUCTOR_ARGUMENTS = dict.fromkeys(LR_KEYS, ("lr", "optimizer")) | {
    "optimizer": ("optimizer",),
    "scheduler": ("scheduler",),
}
# If the user sets one of these keys and groups, the run's `lr` is passed even if the constructor has a default for it.
LR_SETTERS = {*LR_KEYS, "optimizer"}
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # those that torch can fuse on a GPU
OF_THE_MODULE: dict[str, Any] = {"_target_": None}  # in a record: a group of which the module takes nothing
UNFUSED = {"fused", "foreach", "capturable", "differentiable"}  # options by which a user chooses


class ParameterGroups(Protocol):
    """The class that `optimizer.param_groups` names. It is built with `lr_scale`, and used if that has factors."""

    def divide(
        self, groups: Sequence[dict[str, Any]], named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> list[dict[str, Any]]:
        """Return an optimizer's new groups, made from its groups and the module's `named_parameters()`."""

    def scaled_options(self, options: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return those of a schedule's `options` that differ between these groups, each as a list."""


class Factory:
    """Makes what a config group names, from the options of the group, when the module calls it.

    Args:
        key: the config group, for error messages.
        make: the class with its options.
        groups: divides the optimizer's parameter groups.
        further: options of the group that are not options of the class.

    Attributes:
        settings: all options with their values in this run, as plain data for checkpoints.
        called: whether the module has called it.
    """

    def __init__(
        self, key: str, make: partial[Any], groups: ParameterGroups | None, further: Mapping[str, Any]
    ) -> None:
        self.key, self.make, self.groups, self.further = key, make, groups, further
        self.called = False
        options = {name: value if is_plain(value) else type(value).__name__ for name, value in make.keywords.items()}
        self.settings = {"_target_": f"{make.func.__module__}.{make.func.__name__}", **options, **further}


class OptimizerFactory(Factory):
    """Makes an optimizer.

    Attributes:
        named_parameters: the module's method, which `groups` needs. It is set when the module exists.
        fuses: whether torch's optimizers update all parameters in one kernel, for GPUs.
    """

    named_parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]]
    fuses = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        made = call(self.key, partial(self.make, **kwargs), *args)
        if self.fuses and not UNFUSED.intersection(self.make.keywords | kwargs):
            fuse(made)
        if self.groups:
            made.param_groups = self.groups.divide(made.param_groups, self.named_parameters())
        return made


def fuse(optimizer: Any) -> None:
    """Let one of torch's optimizers update all parameters in one kernel, where all of them allow it.

    The constructor's `fused=True` does more: it leaves the loss scale of fp16 in the gradients until the step, so that
    Lightning refuses to clip them, and callbacks would see scaled gradients.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if type(optimizer) in FUSED and all(p.is_floating_point() and dense(p) for p in parameters):
        for group in (optimizer.defaults, *optimizer.param_groups):
            group["fused"] = True


class SchedulerFactory(Factory):
    """Makes Lightning's `lr_scheduler` dict, whose other keys are in `further`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        if self.groups:
            optimizer = kwargs.get("optimizer", *args[:1])
            kwargs = self.groups.scaled_options(self.make.keywords, getattr(optimizer, "param_groups", [])) | kwargs
        return {"scheduler": call(self.key, partial(self.make, **kwargs), *args), **self.further}


def training_arguments(config: Config, samples: int) -> dict[str, Any]:
    """Return the arguments about training that a module's constructor may take.

    These are `lr`, `optimizer`, `scheduler`, `total_steps` and `steps_per_epoch`. In an evaluation `optimizer` and
    `scheduler` are None, and so are those that the config marks as the module's own (`as_built`).
    """
    length = run_length(config, samples)
    numbers: dict[str, Any] = {
        "lr": config.scaled_lr,
        "total_steps": length.steps,
        "steps_per_epoch": length.steps_per_epoch,
    }
    if not config.trains:
        # A huge number of steps, so that a module's check like `warmup < total_steps` passes.
        return {**numbers, "total_steps": sys.maxsize, "optimizer": None, "scheduler": None}
    if config.optimizer.get("_target_", "") is None:
        return {**numbers, "optimizer": None, "scheduler": _scheduler(config, length, numbers, None, None)}
    options: dict[str, Any] = {**config.optimizer, "_partial_": True}
    groups_config, scale, groups = options.pop("param_groups", None), options.pop("lr_scale", None), None
    if scale and not groups_config:
        raise UserError("optimizer.lr_scale has no effect without optimizer.param_groups: give both")
    if groups_config:
        divides = instantiate("optimizer.param_groups", groups_config, lr_scale=scale or {})
        groups = divides if scale else None  # without factors it is only checked
    make = instantiate("optimizer", options, **numbers)
    optimizer = OptimizerFactory("optimizer", make, groups, {"lr_scale": scale} if scale else {})
    optimizer.fuses = config.layout.accelerator == "gpu"
    trial = call("optimizer", optimizer.make, [nn.Parameter(torch.zeros(1))])  # refuse bad values early
    return {**numbers, "optimizer": optimizer, "scheduler": _scheduler(config, length, numbers, groups, trial)}


def _scheduler(
    config: Config, length: RunLength, numbers: Mapping[str, Any], groups: ParameterGroups | None, trial: Any
) -> SchedulerFactory | None:
    """Return the factory of the schedule; None if the config has none.

    Args:
        trial: an optimizer with which bad values are refused early; None: there is none.
    """
    if not config.scheduler or config.scheduler.get("_target_", "") is None:
        return None
    lightning_keys = {name: each for name, each in config.scheduler.items() if name in Scheduler.__annotations__}
    taken = parameters(locate("scheduler._target_", str(config.scheduler.get("_target_"))))
    whole = with_mode("scheduler", config.scheduler, modes_with_model(config.model), required="mode" in taken)
    schedule = {name: value for name, value in whole.items() if name not in lightning_keys}
    if schedule.get("mode", "") is None:  # there is no metric, which is refused below
        del schedule["mode"]
    _check_units(schedule, str(lightning_keys.get("interval", "epoch")), taken)
    if "epochs" in schedule:  # of torch's OneCycleLR, which would prefer `total_steps`
        numbers = {name: value for name, value in numbers.items() if name != "total_steps"}
    make = instantiate("scheduler", {**schedule, "_partial_": True}, **numbers)
    scheduler = SchedulerFactory("scheduler", make, groups, lightning_keys)
    made = call("scheduler", scheduler.make, trial) if trial is not None else None
    if isinstance(made, ReduceLROnPlateau):
        if made.patience < 0:
            raise UserError(f"scheduler.patience={made.patience}: must be at least 0")
        _check_plateau_metric(lightning_keys, config.val_every, length.steps_per_epoch)
    return scheduler


def _check_units(schedule: Mapping[str, Any], interval: str, taken: set[str]) -> None:
    """Refuse options of a schedule that count steps, if it is updated after each epoch.

    Args:
        schedule: the options of the schedule's class.
        interval: after what it is updated, `step` or `epoch`.
        taken: the arguments of the class. It is offered `total_steps`.
    """
    of_steps = [name for name, value in schedule.items() if value == f"{LATER}total_steps"]
    of_steps += ["total_steps"] * ("total_steps" in taken and not {"total_steps", "epochs"} & schedule.keys())
    if of_steps and interval == "epoch":
        raise UserError(
            f"scheduler: {of_steps[0]} counts steps, and the schedule is updated after each epoch: give interval: step "
            "in its page, or scheduler.interval=step"
        )


def without_defaulted(arguments: Mapping[str, Any], target: Any, config: Config) -> dict[str, Any]:
    """Return the arguments of `training_arguments` without those for which the constructor's own defaults hold.

    A run always has an `lr`, mostly that of its optimizer. It must not replace the default of a constructor which makes
    an optimizer of its own. `None` is no default.
    """
    left_out = text_defaults(target)
    makes_optimizer = "optimizer" not in parameters(target) - left_out
    if makes_optimizer and defaults(target).get("lr") is not None and not LR_SETTERS & config.requested:
        left_out.add("lr")
    return {name: value for name, value in arguments.items() if name not in left_out}


def text_defaults(target: Any) -> set[str]:
    """Return which of `optimizer` and `scheduler` are texts in a constructor, so that they are no factories of ours."""
    return {name for name in ("optimizer", "scheduler") if isinstance(defaults(target).get(name), str)}


def as_built(raw: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return a run's config as any program can build the same module from it, whatever keys the user has set.

    Each class in `model` that gets a learning rate has it as its option `lr`. A group of which the module takes nothing
    has `_target_: null`. `data` has the size of the images that was chosen from the files. If the module makes its own
    optimizer, `lr` is that of the module; it is missing if the module takes none. Of a module that takes both groups,
    and of which no part takes `lr`, nothing else changes.

    Args:
        raw: the config as plain containers, before or after the checks.
        config: the checked config.
    """
    located = locate("model._target_", config.model["_target_"])
    taken = parameters(located) - set(config.model) - text_defaults(located)
    keeps_defaults = not LR_SETTERS & config.requested
    model: dict[str, Any] = _with_lr({**raw["model"], "_target_": None}, config.scaled_lr, keeps_defaults)
    model["_target_"] = raw["model"]["_target_"]
    if "image_size" in raw["data"]:
        raw = {**raw, "data": {**raw["data"], "image_size": config.data["image_size"]}}
    built = {**raw, "model": model, **{key: OF_THE_MODULE for key in ("optimizer", "scheduler") if key not in taken}}
    if "optimizer" in taken:
        return built
    if "scheduler" in taken:
        built["scheduler"] = _with_lr(raw.get("scheduler") or {}, config.scaled_lr, keeps_defaults)
    if "lr" in parameters(located) and "lr" not in model:
        lr = without_defaulted({"lr": config.scaled_lr}, located, config).get("lr", defaults(located).get("lr"))
        model |= {"lr": lr} if isinstance(lr, int | float) else {}
    built |= {"lr_scaling": "none"} if "lr_scaling" in raw else {}  # the values are scaled already
    if isinstance(model.get("lr"), int | float):
        return {**built, "lr": model["lr"]}
    return {key: value for key, value in built.items() if key != "lr"}


def _with_lr(value: Any, lr: float, keeps_defaults: bool) -> Any:
    """Return a config's value in which every class that gets the run's `lr` has it, as `instantiate` passes it."""
    if isinstance(value, list | tuple):
        return type(value)(_with_lr(each, lr, keeps_defaults) for each in value)
    if not isinstance(value, Mapping):
        return lr if value == f"{LATER}lr" else value
    options = {name: _with_lr(each, lr, keeps_defaults) for name, each in value.items()}
    if options.get("_target_") is not None and "lr" not in options:
        target = locate("model._target_", str(options["_target_"]))
        gets_lr = "lr" in parameters(target) and not (keeps_defaults and defaults(target).get("lr") is not None)
        options |= {"lr": lr} if gets_lr else {}
    return options


def _check_plateau_metric(lightning_keys: Mapping[str, Any], val_every: int | None, epoch: int) -> None:
    """Check that ReduceLROnPlateau has a metric, and that the metric exists whenever the schedule reads it.

    Args:
        lightning_keys: the keys of Lightning's `lr_scheduler` dict.
        epoch: optimizer steps of an epoch.
    """
    monitor, interval = str(lightning_keys.get("monitor", "")), lightning_keys.get("interval", "epoch")
    if not monitor:
        raise UserError(
            "scheduler: ReduceLROnPlateau needs a metric: "
            "give +scheduler.monitor=val/loss, say, of which the smallest value is the best"
        )
    if monitor.startswith("train/") and interval == "step":
        raise UserError(f"scheduler.monitor={monitor} is known at an epoch's end only: use scheduler.interval=epoch")
    steps_between_reads = lightning_keys.get("frequency", 1) * (epoch if interval == "epoch" else 1)
    steps_between_values = val_every or epoch
    if monitor.startswith("val") and steps_between_reads < steps_between_values:
        every, epoch_or = plural(steps_between_reads, "step"), "scheduler.interval=epoch or "
        raise UserError(
            f"scheduler.interval={interval} reads {monitor} every {every}, but it changes every {steps_between_values} "
            f"steps: use {epoch_or * (steps_between_reads < epoch)}val_every={steps_between_reads}"
        )


def settings(config: Config, samples: int) -> dict[str, Any]:
    """Return the settings of the optimizer and the schedule that the module takes, as plain data."""
    target = locate("model._target_", config.model["_target_"])
    offered = without_defaulted(training_arguments(config, samples), target, config)
    takes = parameters(target) - {"steps_per_epoch"}
    taken = {name: value for name, value in offered.items() if name in takes}
    return {name: value.settings if isinstance(value, Factory) else value for name, value in taken.items()}


def refuse_keys_without_effect(config: Config) -> None:
    """Refuse keys on the command line that have no effect."""
    target = config.model["_target_"]
    located = locate("model._target_", target)
    takes = parameters(located)
    ours = takes - set(config.model) - text_defaults(located)
    peak = config.scheduler.get("max_lr") if "scheduler" in ours else None
    for key in config.overridden:
        if key in LR_KEYS and isinstance(peak, int | float | list | tuple):
            raise UserError(
                f"{key} has no effect, since scheduler.max_lr={peak} sets the learning rate: give scheduler.max_lr, or "
                f"write max_lr: {LATER}lr in its page"
            )
        group = key.partition(".")[0]
        if group not in CONSTRUCTOR_ARGUMENTS or ours.intersection(CONSTRUCTOR_ARGUMENTS[group]):
            continue
        if model_arguments := [name for name in CONSTRUCTOR_ARGUMENTS[group] if name in takes]:
            raise UserError(
                f"{key} has no effect, since the model has its own {model_arguments[0]}: use model.{model_arguments[0]}"
            )
        raise UserError(
            f"{key} has no effect, since {target} takes no {CONSTRUCTOR_ARGUMENTS[group][0]}: leave it out, or give "
            f"its constructor a parameter {CONSTRUCTOR_ARGUMENTS[group][0]}"
        )


class OptimizerCheck(OneOptimizerCheck):
    """Refuses also keys without effect."""

    def __init__(self, config: Config) -> None:
        self.target = config.model["_target_"]
        self.overridden = config.overridden

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        ignored = {made.key for made in vars(pl_module).values() if isinstance(made, Factory) and not made.called}
        for key in self.overridden:
            if key.partition(".")[0] in ignored:
                raise UserError(
                    f"{key} has no effect, since the configure_optimizers of {self.target} does not use "
                    f"self.{key.partition('.')[0]}: leave it out"
                )
