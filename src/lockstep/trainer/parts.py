"""What every Trainer is made of, whether a config or a user's own code makes it."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

from lockstep.arithmetic.layout import Layout
from lockstep.errors import UserError
from lockstep.guards.first_step import FirstStepCheck
from lockstep.launch.environment import environment
from lockstep.lightning.hooks import overrides_method
from lockstep.step.finite import FiniteGradientCheck
from lockstep.step.hook import StepHook
from lockstep.text import is_url

LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")
ONE_OPTIMIZER = (
    "return one, with a parameter group for each part that is trained differently; freeze parameters with "
    "requires_grad_(False)"
)
# Arguments of `training_step` that can't work with a step in pieces.
REFUSED_ARGUMENTS = {
    "optimizer_idx": "which is of Lightning 1: remove the argument, since there is one optimizer",
    "dataloader_iter": "which would fetch its own batches, and a step is cut into pieces: take the batch",
}
# Callbacks of Lightning that can't work with a step in pieces, each with what it would do, and what to use instead.
REFUSED_CALLBACKS = {
    BatchSizeFinder: "would change batch_size, and so what is trained: give more pieces, which need less memory at a "
    "time; `lockstep fit-memory` finds how many",
    GradientAccumulationScheduler: "changes how many batches make a step, which the layout fixes: use "
    "accumulate_grad_batches or pieces",
    StochasticWeightAveraging: "takes over the schedule and adds an epoch: use Lightning's EMAWeightAveraging, or "
    "callbacks=ema in a config",
}


def step_checks(layout: Layout, nonfinite: str, compiled: bool = False) -> list[StepHook]:
    """Return the hooks that check the first step of a run, and the gradients of each step.

    Args:
        layout: the run's layout.
        nonfinite: see `lockstep.Trainer`.
        compiled: whether the network is compiled.
    """
    later = layout.accelerator == "gpu"
    finite = FiniteGradientCheck(nonfinite, one_step_later=later, compiled=compiled)
    return [FirstStepCheck(compiled=compiled), finite]


def device_options(layout: Layout) -> dict[str, Any]:
    """Return the options of Lightning's Trainer that follow from a layout."""
    # A worker that sees only its own GPU is a machine of its own for Lightning.
    one_gpu = environment().dedicated_gpu and layout.accelerator == "gpu"
    return {
        "accelerator": layout.accelerator,
        "devices": 1 if one_gpu or layout.world_size == 1 else layout.devices,
        "num_nodes": layout.world_size if one_gpu else layout.num_nodes,
        "deterministic": needs_deterministic_kernels(layout) or None,  # None: as the user has set torch
    }


def needs_deterministic_kernels(layout: Layout) -> bool:
    """Return whether torch must use deterministic kernels: on a GPU, if the result must be exact.

    torch would then also fill all new memory, with one more kernel for each tensor. Leave that out.
    """
    needed = bool(layout.exact) and layout.accelerator == "gpu"
    if needed:
        flags: Any = torch.utils.deterministic
        flags.fill_uninitialized_memory = False
    return needed


def rank_of_replica(layout: Layout) -> int:
    """Return this process's number among those that share the pieces of a step.

    In a staged layout each process has a part of one network, so all processes get the same pieces.
    """
    return environment().rank if layout.replicas > 1 else 0


def refuse_other_package(what: str, value: Any) -> None:
    """Refuse an object of the package pytorch_lightning, whose classes are not those of lightning.pytorch.

    Args:
        what: what it is, for messages.
        value: the object.
    """
    if any(kind.__module__.partition(".")[0] == "pytorch_lightning" for kind in type(value).__mro__):
        raise UserError(
            f"{what} {type(value).__name__} is of the package pytorch_lightning, and Lockstep stands on "
            "lightning.pytorch: write import lightning.pytorch as pl instead of import pytorch_lightning as pl"
        )


def refuse_compiled(stage: str, module: Any) -> None:
    """Refuse a LightningModule that `torch.compile` has wrapped."""
    if isinstance(module, torch._dynamo.OptimizedModule):
        raise UserError(f"trainer.{stage} got a compiled module: compile the network in its __init__ instead")


def refuse_hooks(setting: str, module: pl.LightningModule, loaders: str = "") -> None:
    """Refuse a module whose steps can't be cut into pieces, or with loaders of its own that are not used.

    Args:
        setting: what chooses the module, for messages.
        loaders: what is used instead of the module's loaders; empty: nothing.
    """
    for name in LOADERS if loaders else ():
        if overrides_method(module, name, pl.LightningModule):
            raise UserError(f"{setting}: its {name} would not be called: use {loaders}")
    for name, why in REFUSED_ARGUMENTS.items():
        if name in inspect.signature(module.training_step).parameters:
            raise UserError(f"{setting}: its training_step takes {name}, {why}")
    if not module.automatic_optimization:
        raise UserError(f"{setting}: manual optimization can't cut a step into pieces: use automatic optimization")


def refuse_callback(setting: str, callback: Any) -> None:
    """Refuse what is no callback, and a callback of Lightning that can't work with a step in pieces.

    Args:
        setting: what chooses the callback, for messages.
    """
    refuse_other_package(f"{setting}:", callback)
    if not isinstance(callback, pl.Callback):
        name = type(callback).__name__
        raise UserError(f"{setting}: a {name} is no lightning.pytorch.Callback: give an object of one")
    for kind, wrong in REFUSED_CALLBACKS.items():
        if isinstance(callback, kind):
            raise UserError(f"{setting}: {type(callback).__name__} {wrong}")
    if isinstance(callback, EarlyStopping) and callback.patience < 0:
        raise UserError(f"{setting}.patience={callback.patience}: must be at least 0")
    if isinstance(callback, ModelCheckpoint) and callback.dirpath and is_url(str(callback.dirpath)):
        raise UserError(f"{setting}: dirpath={callback.dirpath}: must be a folder of this machine, not a URL")
    if isinstance(callback, ModelCheckpoint) and callback.save_last == "link":
        raise UserError(
            f"{setting}: {type(callback).__name__} with save_last=link would link a file before it is written, and "
            "after a kill there would be none: use save_last=true"
        )


class OneOptimizerCheck(pl.Callback):
    """Refuses, before the first step, a module without an optimizer or with several, and what one rank would choose."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        finders = [each for each in trainer.callbacks if isinstance(each, LearningRateFinder)]  # type: ignore[attr-defined]
        if stage == "fit" and finders and trainer.world_size > 1:
            raise UserError(
                f"{type(finders[0]).__name__} follows the loss of one rank's samples, so {trainer.world_size} ranks "
                "would find other rates: run it on one device, or with strategy=dp, and give the rate"
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not any(optimizer.param_groups for optimizer in trainer.optimizers):
            raise UserError(f"configure_optimizers returned no optimizer: {ONE_OPTIMIZER}")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if "multiple optimizers" in str(exception):  # Lightning's own message advises manual optimization
            raise UserError(f"configure_optimizers returned several optimizers: {ONE_OPTIMIZER}") from exception


def callbacks_of(returned: Any) -> Iterator[pl.Callback]:
    """Yield the callbacks that a module's `configure_callbacks` returned."""
    yield from returned if isinstance(returned, Sequence) else [returned]  # Hydra gives its own lists
