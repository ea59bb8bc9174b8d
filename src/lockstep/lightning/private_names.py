"""What a Trainer reads of a user's objects that has no public name in Lightning."""

import inspect
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy


def take_identity(adapter: Any, owner: pl.LightningDataModule) -> None:
    """Give the data module of a Trainer the hyperparameters of a user's, and the name of its class.

    Lightning logs and saves the hyperparameters, and saves the state of a data module under the name of its class. To
    `isinstance`, the adapter is of the user's class, too.

    See it: MyData.load_from_checkpoint; without this, it makes one with the defaults.
    """
    for name in ("_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams"):
        if name in vars(owner):
            vars(adapter)[name] = vars(owner)[name]
    kind = type(owner)
    looks = {"__qualname__": kind.__qualname__, "__class__": property(lambda _: kind)}
    adapter.__class__ = type(kind.__name__, (type(adapter),), looks)


def unusual_option(strategy: DDPStrategy | SingleDeviceStrategy) -> str:
    """Return what an object of Lightning's strategies has that changes a run and would be lost; empty if nothing.

    Other options (`find_unused_parameters`, `static_graph`, sizes of buckets) only tune torch's DDP, which is not used.
    The device and the timeout are not lost, see `device_of` and `timeout_of`. Lightning has no public names for them.
    """
    if type(strategy) not in (DDPStrategy, SingleDeviceStrategy):
        return "methods of its own"
    names = (
        *("_accelerator", "_checkpoint_io", "_precision_plugin"),
        *("_ddp_comm_hook", "_model_averaging_period", "parallel_devices", "cluster_environment"),
    )
    options = {name.removeprefix("_"): getattr(strategy, name, None) for name in names}
    if named := next((name for name, value in options.items() if value is not None), ""):
        return named
    backend = getattr(strategy, "_process_group_backend", None)
    if backend not in (None, "nccl" if torch.cuda.is_available() else "gloo"):
        return f"process_group_backend={backend}"
    start = getattr(strategy, "_start_method", "popen")
    return "" if start == "popen" else f"start_method={start}"


def device_of(strategy: SingleDeviceStrategy) -> torch.device:
    """Return the device that a strategy's object was made with."""
    return torch.device(strategy._root_device)


def timeout_of(strategy: Any) -> timedelta | None:
    """Return the timeout that an object of Lightning's strategies was made with; None: it has none, or the default."""
    timeout = getattr(strategy, "_timeout", None) if isinstance(strategy, DDPStrategy) else None
    return None if timeout == inspect.signature(DDPStrategy).parameters["timeout"].default else timeout


def last_checkpoints(trainer: pl.Trainer) -> list[str]:
    """Return the paths of the last checkpoints that the Trainer's ModelCheckpoint callbacks have written, in any run.

    Lightning looks for them in `fit(ckpt_path="last")` only.
    """
    callbacks = (each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint))
    return [str(path) for callback in callbacks for path in callback._find_last_checkpoints(trainer)]
