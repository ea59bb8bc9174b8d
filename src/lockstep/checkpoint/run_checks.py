"""Refuse, before the first step, what would make a run's checkpoints useless.

These are shared files, new names of parameters, and what is no plain data.
"""

import os
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning, OnExceptionCheckpoint
from torch import nn

from lockstep.checkpoint import paths
from lockstep.checkpoint.callback import Checkpoint
from lockstep.checkpoint.plain import MODULE, is_plain
from lockstep.errors import UserError
from lockstep.lightning.hooks import overrides_method
from lockstep.step.trial import without_traces
from lockstep.text import join_names

OUR_NAMES = re.compile(r"(last|best|step_\d+)\.ckpt")  # in `checkpoints/`, see paths.py


class SharedFileCheck(pl.Callback):
    """Refuses a checkpoint callback that writes a file which the run or another callback writes.

    Args:
        folder: the run's folder.
        callbacks: the callbacks of the config and the module, by their names for messages.

    Raises:
        UserError: there is such a callback, as far as their folders are known before Lightning chooses one.
    """

    def __init__(self, folder: Path, callbacks: Mapping[str, pl.Callback]) -> None:
        self._folder = paths.folder(folder)
        self._names = {id(callback): name for name, callback in callbacks.items()}
        # Now, since some callbacks of Lightning write a checkpoint because of a refusal in the Trainer.
        self._check(each for each in callbacks.values() if getattr(each, "dirpath", "") is not None)

    def on_fit_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self._check(trainer.callbacks)

    def _check(self, callbacks: Iterable[pl.Callback]) -> None:
        owners: dict[str, str] = {}
        for callback in callbacks:
            kind = type(callback).__name__
            name = self._names.get(id(callback), f"configure_callbacks: {kind}")
            ours = isinstance(callback, Checkpoint)
            for path in dict.fromkeys(map(os.path.realpath, _targets(callback))):
                file = os.path.basename(path)
                if not ours and _same_folder(os.path.dirname(path), self._folder) and OUR_NAMES.fullmatch(file):
                    raise UserError(
                        f"{name} writes {file} into the run's checkpoints/, where the run has its own: "
                        "give it another filename or dirpath"
                    )
                if owner := owners.get(path):
                    raise UserError(f"{name} writes {file} where {owner} writes it: give one of them another filename")
                owners[path] = name


def _same_folder(one: str, other: Path) -> bool:
    """Check whether two paths mean one folder, which may not exist yet."""
    if os.path.exists(one) and other.exists():
        return os.path.samefile(one, other)
    return one == os.path.realpath(other)


def _targets(callback: pl.Callback) -> Iterator[str]:
    """Yield the paths that a callback writes checkpoints of its own to, with 0 for each number in a name."""
    if isinstance(callback, Checkpoint) and callback.monitor is not None:
        yield str(callback.best_target)
    if isinstance(callback, OnExceptionCheckpoint):
        yield callback.ckpt_path
    if not isinstance(callback, ModelCheckpoint):
        return
    if callback.save_top_k != 0:
        yield callback.format_checkpoint_name({})
    if callback.save_last:
        yield callback.format_checkpoint_name({}, callback.CHECKPOINT_NAME_LAST)


def refuse_saved_objects(trainer: Any, module: pl.LightningModule) -> None:
    """Refuse a module whose `on_save_checkpoint` adds what is no plain data. The first save would do so after an epoch.

    Raises:
        UserError: it is such a module.
    """
    if not trainer.checkpoint_callbacks or not overrides_method(module, "on_save_checkpoint", MODULE):
        return
    content = {"epoch": 0, "global_step": 0, "state_dict": module.state_dict()}
    content[MODULE.CHECKPOINT_HYPER_PARAMS_KEY] = dict(module.hparams)
    names = {*content}
    with suppress(Exception), without_traces(module, trainer):  # it may need what the first step makes
        module.on_save_checkpoint(content)
    if added := sorted(name for name in content.keys() - names if not is_plain(content[name])):
        raise UserError(
            f"on_save_checkpoint of {type(module).__name__} adds {join_names(added)}, which is no plain data, so no "
            "checkpoint could be saved: add numbers, texts and tensors, or lists and dicts of them"
        )


class ParameterNameCheck(pl.Callback):
    """Refuses callbacks and hooks that rename, add or replace parameters, since no run could continue with them.

    A new process builds the module anew, so its parameters have the names of the beginning. What renames them before
    the first step ends the run there. What does so later ends it before a checkpoint is saved, so the earlier one
    remains.

    Args:
        module: the module as it was built.
    """

    changes_weights = False  # so the record of settings that affect the weights leaves this callback out

    def __init__(self, module: nn.Module) -> None:
        self._built: Any = {name: weakref.ref(each) for name, each in module.named_parameters()}  # None in a copy
        self._first_step = True

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of a Trainer needs, whose next fit makes another check: references can't be pickled."""
        return {**vars(self), "_built": None}

    def on_fit_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, ModelPruning):  # it renames parameters at the end of the first epoch
                raise UserError(
                    f"{type(callback).__name__} renames the parameters that it prunes and saves no masks, so no run "
                    "could continue with it: prune the weights of a run that has ended"
                )
        self._check(trainer, pl_module)
        refuse_saved_objects(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self._check(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self._first_step:
            self._first_step = False
            self._check(trainer, pl_module)

    def on_save_checkpoint(self, trainer: Any, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        self._check(trainer, pl_module)

    def _check(self, trainer: Any, module: pl.LightningModule) -> None:
        """Compare the module's parameters with those it was built with, and with those that the optimizer trains.

        Raises:
            UserError: they differ.
        """
        if self._built is None:
            return
        now, cause = dict(module.named_parameters()), "a callback, or a hook of the module,"
        right = "do it in the module's __init__ or configure_model"
        if changed := [name for name in now if name not in self._built] + sorted(self._built.keys() - now.keys()):
            raise UserError(
                f"{cause} adds, removes or renames parameters ({join_names(changed)}), so no run could continue: "
                f"{right}"
            )
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        # The type of a part, which `fully_shard` puts in place of a parameter, is none of nn.Parameter.
        replaced = {name: each for name, each in now.items() if self._built[name]() is not each}
        replaced = {name: each for name, each in replaced.items() if issubclass(type(each), nn.Parameter)}
        if lost := [name for name, each in replaced.items() if each.requires_grad and id(each) not in trained]:
            raise UserError(
                f"{cause} replaces parameters after the optimizer has got them ({join_names(lost)}), so nothing "
                f"trains them: {right}"
            )
