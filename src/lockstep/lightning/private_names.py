"""What a Trainer reads of a user's objects that has no public name in Lightning."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy


def take_identity(adapter: Any, owner: pl.LightningDataModule) -> None:
    """Give the data module of a Trainer the hyperparameters of a user's, and the name of its class.

    Lightning logs and saves the hyperparameters, and saves the state of a data module under the name of its class.

    See it: MyData.load_from_checkpoint; without this, it makes one with the defaults.
    """
    for name in ("_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams"):
        if name in vars(owner):
            vars(adapter)[name] = vars(owner)[name]
    kind = type(owner)
    adapter.__class__ = type(kind.__name__, (type(adapter),), {"__qualname__": kind.__qualname__})


def unusual_option(strategy: DDPStrategy | SingleDeviceStrategy) -> str:
    """Return what an object of Lightning's strategies has that changes a run and would be lost; empty if nothing.

    Other options (`find_unused_parameters`, `static_graph`, sizes of buckets) only tune torch's DDP, which is not used.
    Lightning has no public names for them.
    """
    if type(strategy) not in (DDPStrategy, SingleDeviceStrategy):
        return "methods of its own"
    names = ("_checkpoint_io", "_precision_plugin", "_ddp_comm_hook", "_model_averaging_period")
    options = {name.removeprefix("_"): getattr(strategy, name, None) for name in names}
    if named := next((name for name, value in options.items() if value is not None), ""):
        return named
    start = getattr(strategy, "_start_method", "popen")
    return "" if start == "popen" else f"start_method={start}"


def last_checkpoints(trainer: pl.Trainer) -> list[str]:
    """Return the paths of the last checkpoints that the Trainer's ModelCheckpoint callbacks have written, in any run.

    Lightning looks for them in `fit(ckpt_path="last")` only.
    """
    callbacks = (each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint))
    return [str(path) for callback in callbacks for path in callback._find_last_checkpoints(trainer)]
