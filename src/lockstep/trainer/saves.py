"""When the checkpoints of a user's callbacks are saved: after all that belongs to their step."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint

from lockstep.step.lightning_quirks import current_hook, validation_or_epoch_end_follows

# Hooks in which no step is under way. A checkpoint that is saved in another one waits.
BETWEEN_STEPS = {
    *("", "setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_end", "on_fit_end"),
    *("teardown", "on_exception"),
}


class SaveAfterStep(LightningCheckpoint):  # Lightning calls checkpoint callbacks last; this is the last of them
    """Saves the checkpoints that other callbacks ask for, when the step is complete.

    A step is complete after its validation, the end of its epoch, and the schedules that follow their metrics.
    Lightning's ModelCheckpoint saves before that, and a run that continues would miss what comes after.

    Args:
        save: saves a checkpoint now, with the arguments of Lightning's `Trainer.save_checkpoint`.
    """

    def __init__(self, save: Callable[..., None]) -> None:
        self._save = save
        self._waiting: dict[str, tuple[Any, ...]] = {}  # arguments of `save`, by path

    def add(self, trainer: Trainer, path: Any, *args: Any) -> bool:
        """Let a checkpoint wait, if a step is under way. Return whether it waits."""
        if current_hook(trainer.lightning_module) in BETWEEN_STEPS:
            return False
        self._waiting[str(path)] = (path, *args)
        checkpoint_io: Any = trainer.strategy.checkpoint_io
        checkpoint_io.removals = checkpoint_io.removals or []  # of the files that this one replaces
        return True

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if not validation_or_epoch_end_follows(trainer):
            self._save_all(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and not trainer.is_last_batch:  # else the end of the epoch follows
            self._save_all(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_all(trainer)

    def _save_all(self, trainer: Any) -> None:
        waiting, self._waiting = self._waiting, {}
        if waiting:
            trainer.fit_loop.epoch_loop.follow_metrics()
        for arguments in waiting.values():
            self._save(*arguments)
        checkpoint_io = trainer.strategy.checkpoint_io
        removals, checkpoint_io.removals = checkpoint_io.removals or [], None
        for path in removals:
            checkpoint_io.remove_checkpoint(path)
