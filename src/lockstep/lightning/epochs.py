"""The loop over epochs: a resumed run goes on as one that was not stopped."""

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lockstep.launch.failures import no_silent_end
from lockstep.lightning.strategy import Hooks
from lockstep.step.batch import data_of


class AfterStart(pl.Callback):
    """A callback with a hook that comes after `on_train_start` of all callbacks and of the module.

    See it: a module that freezes in `on_train_start`, and what a callback's own `on_train_start` sees of it.
    """

    def after_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Act before the first epoch of this fit."""


class StepFitLoop(_FitLoop):
    """Counts each epoch once, reduces what was logged before something follows it, and runs until its steps are made.

    See it: `on_train_epoch_start` with `raise StopIteration`; the run ends as if it were complete.
    """

    trainer: Any
    epoch_loop: Any

    def setup_data(self) -> None:
        """Make the loader. The order of the samples applies the user's limit of batches, if it has one."""
        trainer = self.trainer
        limit = trainer.limit_train_batches
        try:
            if limit and data_of(trainer).order.most is not None:
                trainer.limit_train_batches = 1.0
            super().setup_data()
        finally:
            trainer.limit_train_batches = limit

    def run(self) -> None:
        """Train; also inside a hook of an epoch's start, as LearningRateFinder may."""
        with self.trainer.saves.set_aside() if self.trainer.saves.starts_epoch else nullcontext():
            super().run()

    def on_run_start(self) -> None:
        """Call the hooks of the start, then those after it."""
        super().on_run_start()
        for callback in self.trainer.callbacks:
            if isinstance(callback, AfterStart):
                callback.after_train_start(self.trainer, self.trainer.lightning_module)

    def on_advance_start(self) -> None:
        """Begin an epoch. A checkpoint that a hook asks for waits for the others, which a resumed run does not call."""
        self.trainer.saves.begin_step(starts_epoch=True)
        self.epoch_loop.seed_hooks(Hooks.EPOCH_START, self.trainer.current_epoch)
        with no_silent_end():
            super().on_advance_start()

    def advance(self) -> None:
        """Run an epoch; see `no_silent_end`."""
        with no_silent_end():
            super().advance()

    def _iteration_based_training(self) -> bool:
        """Return False, so that each epoch is counted once.

        See it: a run with max_steps, resumed from a checkpoint of an epoch's end; `current_epoch` is one too large.
        """
        return False

    def on_advance_end(self) -> None:
        """End an epoch as Lightning does, but reduce what `on_train_epoch_end` has logged before callbacks follow it.

        See it: a module that logs the mean of a list in `on_train_epoch_end`, with EarlyStopping on it, on two ranks.
        """
        trainer, connector = self.trainer, self.trainer._logger_connector
        connector.epoch_end_reached()
        self.epoch_progress.increment_processed()
        self.epoch_loop.seed_hooks(Hooks.EPOCH_END, trainer.current_epoch)
        with no_silent_end():
            call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=False)
            call._call_lightning_module_hook(trainer, "on_train_epoch_end")
            connector.reduce_epoch()
            call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=True)
        connector.on_epoch_end()
        if not self.restarting and self.epoch_loop._num_ready_batches_reached():
            self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        self.epoch_loop._batches_that_stepped -= 1  # loggers expect the step of the last batch
        connector.update_train_epoch_metrics()
        self.epoch_loop._batches_that_stepped += 1
        self.epoch_progress.increment_completed()
        if trainer.received_sigterm:  # without checkpoints Lightning's handler stays
            raise SIGTERMException


def is_last_step(trainer: pl.Trainer) -> bool:
    """Check whether the step just taken is the last one of the run."""
    last_epoch = trainer.current_epoch + 1 == trainer.max_epochs
    return trainer.global_step == trainer.max_steps or (last_epoch and trainer.is_last_batch)


def last_validation_follows(trainer: pl.Trainer) -> bool:
    return getattr(trainer, "validates_last_step", True) and is_last_step(trainer)


def validation_or_epoch_end_follows(trainer: pl.Trainer) -> bool:
    """Check whether a validation, or the end of an epoch, follows the step just taken.

    A checkpoint must wait for it. A run that resumed from an earlier checkpoint would miss the validation, and with it
    the best checkpoint and the means of the epoch.
    """
    if trainer.is_last_batch:
        return True
    if not (trainer.enable_validation and any(trainer.num_val_batches)):
        return False
    every, step = trainer.check_val_every_n_epoch, trainer.global_step
    if every is not None:  # then Lightning counts the steps of each epoch
        if (trainer.current_epoch + 1) % every:
            return last_validation_follows(trainer)
        step = trainer.fit_loop.epoch_loop.batch_idx + 1
    if trainer._val_check_time_interval is not None:  # type: ignore[attr-defined]
        due = trainer.fit_loop.epoch_loop.validation_is_due  # type: ignore[attr-defined]
        return due or last_validation_follows(trainer)
    return step % int(trainer.val_check_batch or 1) == 0 or last_validation_follows(trainer)
