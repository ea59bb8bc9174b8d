"""What a Trainer reads of a user's objects that has no public name in Lightning."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy


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


def unusual_ddp_option(strategy: DDPStrategy) -> str:
    """Return the name of an option of Lightning's DDPStrategy that changes what is sent or who starts processes.

    Others (`find_unused_parameters`, `static_graph`, sizes of buckets) only tune torch's DDP, which is not used.
    Lightning has no public names for them.
    """
    names = {"ddp_comm_hook": strategy._ddp_comm_hook, "model_averaging_period": strategy._model_averaging_period}
    named = next((name for name, value in names.items() if value is not None), "")
    return named or ("" if strategy._start_method == "popen" else f"start_method={strategy._start_method}")


def last_checkpoints(trainer: pl.Trainer) -> list[str]:
    """Return the paths of the last checkpoints that the Trainer's ModelCheckpoint callbacks have written, in any run.

    Lightning looks for them in `fit(ckpt_path="last")` only.
    """
    callbacks = (each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint))
    return [str(path) for callback in callbacks for path in callback._find_last_checkpoints(trainer)]
