"""What Lightning leaves out of a checkpoint, and a run needs to go on as if it had never ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lockstep.launch.atomic import same_file
from lockstep.launch.watchdog import patient

LENGTH = ("callbacks", "max_epochs", "max_steps")  # who changes one of them means to train on


class ResumeState(pl.Callback):
    """Whether a callback has ended training (EarlyStopping, say), and what was frozen or unfrozen since it began. The
    checkpoint that it goes on from becomes its last one: a group that is started again goes on from there too.

    Args:
        config: the run's plain config.
        folder: the run folder.
    """

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self.last = folder / "checkpoints" / "last.ckpt"
        self.length = {key: config.get(key) for key in LENGTH}
        self._trained: dict[str, bool] = {}  # by name of the parameter, as the run begins
        self._changed: dict[str, bool] = {}  # since then, in the run that goes on

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._trained = _trained(pl_module)

    @patient()
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        used = Path(trainer.ckpt_path or self.last)
        if used != self.last and used.parent == self.last.parent and trainer.is_global_zero:
            same_file(used, self.last)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        changed = {name: now for name, now in _trained(pl_module).items() if now != self._trained.get(name)}
        checkpoint["continuation"] = {"stopped": trainer.should_stop, "length": self.length, "trained": changed}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        saved = checkpoint.get("continuation")
        if saved is None or trainer.state.fn != "fit":
            return
        trainer.should_stop = saved["stopped"] and saved["length"] == self.length
        self._changed = saved["trained"]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, trained in self._changed.items():  # the optimizer was made before, as it was then
            pl_module.get_parameter(name).requires_grad_(trained)


def _trained(module: pl.LightningModule) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}
