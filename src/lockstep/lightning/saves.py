"""When checkpoints are saved: after all that belongs to their step.

A step is complete after the last hook of it, of its validation, and of the epoch if they follow. Lightning calls a hook
of the callbacks before that of the module, so a callback that saves in its own hook would save before the module's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerStatus

from lockstep.lightning.hooks import current_hook


class SavesSteps(LightningCheckpoint):  # Lightning calls checkpoint callbacks last
    """A callback that may save a checkpoint whenever a step is complete."""

    def on_step_complete(self, trainer: Any, ends_epoch: bool) -> None:
        """Save if it is due. All ranks call this.

        Args:
            ends_epoch: whether the hooks of an epoch's end have run; then it is the second call for a step after which
                the run ends inside an epoch.
        """


class WaitingSaves:
    """The checkpoints that hooks have asked for while a step is under way. They are saved when it is complete.

    Args:
        trainer: the trainer.
        save: saves a checkpoint now, with the arguments of Lightning's `Trainer.save_checkpoint`.

    Attributes:
        under_way: whether a step has begun and is not complete.
        starts_epoch: whether the hooks of an epoch's start run. What they ask for is saved at once, too, since one of
            them may train and load it: LearningRateFinder does. Nothing is incomplete then.
        made: whether any was saved since loggers were last told.
        incomplete: whether its passes have begun, too: what is saved now, after an error, is no state between steps.
    """

    def __init__(self, trainer: Any, save: Callable[..., None]) -> None:
        self._trainer, self._save = trainer, save
        self._waiting: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}  # arguments of `save`, by path
        self.under_way = self.starts_epoch = self.incomplete = self.made = False
        self._has_begun = False  # whether any step has

    def begin_step(self, starts_epoch: bool = False) -> None:
        """Let the checkpoints wait that are asked for from now on."""
        self.under_way, self.starts_epoch, self.incomplete, self._has_begun = True, starts_epoch, False, True

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Return a context of a fit inside a hook. What waits outside it is saved when the hook's own step is done."""
        checkpoint_io: Any = self._trainer.strategy.checkpoint_io
        before = self._waiting, self.under_way, self.starts_epoch, checkpoint_io.removals
        self._waiting, self.under_way, checkpoint_io.removals = {}, False, None
        try:
            yield
        finally:
            self._waiting, self.under_way, self.starts_epoch, checkpoint_io.removals = before
            self.incomplete = False

    def add(self, path: Any, *args: Any, **kwargs: Any) -> bool:
        """Let a checkpoint wait, if a step is under way. Return whether it is saved later only.

        After an error before the first step there is nothing to save, and the file may be the one to continue from.
        """
        if current_hook(self._trainer.lightning_module) == "on_exception":
            return not self._has_begun
        if not self.under_way or self._trainer.state.status != TrainerStatus.RUNNING:  # an error has ended the fit
            return False
        self._waiting[str(path)] = (path, *args), kwargs
        checkpoint_io: Any = self._trainer.strategy.checkpoint_io
        # of the files that this one replaces
        checkpoint_io.removals = getattr(checkpoint_io, "removals", None) or []
        return not self.starts_epoch

    def complete_step(self, ends_epoch: bool = False) -> None:
        """Save what is due, now that the step is complete: with the schedules that follow its metrics.

        Args:
            ends_epoch: see `SavesSteps.on_step_complete`.
        """
        self.under_way = self.incomplete = False
        trainer = self._trainer
        for callback in trainer.callbacks:
            if isinstance(callback, SavesSteps):
                callback.on_step_complete(trainer, ends_epoch)
        self.save_waiting()
        if self.made:
            self.made = False
            _tell_loggers(trainer)

    def save_waiting(self) -> None:
        """Save the checkpoints that wait. From now on, none waits until a step begins."""
        trainer, self.under_way, self.incomplete = self._trainer, False, False
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        trainer.fit_loop.epoch_loop.follow_metrics()
        for args, kwargs in waiting.values():
            self._save(*args, **kwargs)
        checkpoint_io = trainer.strategy.checkpoint_io
        removals, checkpoint_io.removals = checkpoint_io.removals or [], None
        for path in removals:
            checkpoint_io.remove_checkpoint(path)


def _tell_loggers(trainer: Any) -> None:
    """Call `after_save_checkpoint` of the loggers that have one, when the files are complete.

    Lightning's ModelCheckpoint calls it when it asks for a file, which is not there yet.

    See it: WandbLogger(log_model="all"), which uploads the files.
    """
    unused = Logger.after_save_checkpoint, TensorBoardLogger.after_save_checkpoint
    loggers = [each for each in trainer.loggers if type(each).after_save_checkpoint not in unused]
    if not loggers or not trainer.is_global_zero:
        return
    trainer.strategy.checkpoint_io.wait()
    for callback in trainer.checkpoint_callbacks:
        if hasattr(callback, "best_k_models"):  # one that chooses among checkpoints
            for logger in loggers:
                logger.after_save_checkpoint(callback)
