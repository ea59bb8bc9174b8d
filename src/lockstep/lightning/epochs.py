"""The loop over epochs, and the loop over an epoch's steps: a resumed run goes on as one that was not stopped."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lockstep.launch.failures import ENDS, no_silent_end, refused_end
from lockstep.launch.process_group import broadcast_from_rank_zero, gather_objects
from lockstep.lightning.evaluations import watched_loop
from lockstep.lightning.hooks import call_of_module
from lockstep.lightning.strategy import Hooks
from lockstep.step.batch import data_of
from lockstep.step.trial import SavedTensors

SECONDS_BETWEEN_LOOKS = 1.0  # of several ranks at rank zero's clock, if a time is the interval between validations


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


class StepEpochLoop(_TrainingEpochLoop):
    """Gives a resumed run the same steps, epochs and schedules as a run that was not stopped."""

    trainer: Any
    _results: Any

    def __init__(self, trainer: pl.Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.val_loop = watched_loop(self.val_loop)
        # by interval, the step of the last update of schedules that follow a metric
        self._followed: dict[str, int] = {}
        self._logged: dict[str, Any] = {}  # from a checkpoint: what was logged since its epoch began
        self.validation_is_due = False  # by the clock
        self._next_look, self._last_look = 0, (0, 0.0)  # at the clock: the step; step and time

    @property
    def global_step(self) -> int:
        """Number of optimizer steps since the run began."""
        return self.automatic_optimization.optim_progress.optimizer_steps

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return the loop's state with what was logged since the epoch began, unless it ends with this checkpoint."""
        state, results, trainer = super().on_save_checkpoint(), self._results, self.trainer
        if trainer.state.fn == "fit" and not self._num_ready_batches_reached():
            gather = (lambda value: [value]) if results.alone else gather_objects
            if logged := results.state(gather):
                state["logged"] = logged
        return state

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Reopen an epoch that `max_steps` ended early. Lightning has counted it and would skip its rest.

        See it: max_steps=5 of epochs of 4 steps, resumed with max_steps=8; the second epoch has one step.
        """
        super().on_load_checkpoint(state_dict)
        self._logged = state_dict.get("logged", {})
        fit_loop = self.trainer.fit_loop
        fit_loop._combined_loader = None  # `estimated_stepping_batches` made it, before the step was restored
        cut = self.batch_progress.current.completed < data_of(self.trainer).order.steps_per_epoch
        if cut and not self.batch_progress.is_last_batch:
            for count in (fit_loop.epoch_progress.current, fit_loop.epoch_progress.total):
                count.processed = count.completed

    def on_run_start(self, data_fetcher: Any) -> None:
        """Call the module's `on_train_epoch_start` also if a run continues inside an epoch.

        It may set Python attributes, which no checkpoint has. What it does to tensors and to the optimizer's groups is
        in the checkpoint already, so this is undone. Callbacks are left out, since they have their own state.
        Validation batches are counted, which Lightning does when a validation is first due:
        `validation_or_epoch_end_follows` asks for them before.

        See it: a module that resets a counter there, resumed inside an epoch; check_val_every_n_epoch=2.
        """
        super().on_run_start(data_fetcher)
        if self.trainer.enable_validation:
            self.trainer.validating = True
            self.val_loop.setup_data()
            self.trainer.training = True
        self._batches_that_stepped = self.global_step
        self.validation_is_due, self._next_look = False, 0
        self._last_look = self.global_step, time.monotonic()
        self._results.restore(self._logged, takes_all=self.trainer.is_global_zero)
        self._logged = {}
        self.trainer._logger_connector.begin_fit()
        self._followed = dict.fromkeys(("step", "epoch"), self.global_step)
        if self.trainer.fit_loop.restarted_mid_epoch:
            with unchanged(self.trainer):
                self.trainer.fit_loop.epoch_loop.seed_hooks(Hooks.EPOCH_START, self.trainer.current_epoch)
                call._call_lightning_module_hook(self.trainer, "on_train_epoch_start")

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Validate if it is due; see `no_silent_end`, which takes 1 us more."""
        try:
            super().on_advance_end(data_fetcher)
        except ENDS as end:
            raise refused_end(end) from end

    def _accumulated_batches_reached(self) -> bool:
        """Return True, since a batch of this loop is a whole step; `accumulate_grad_batches` is for users to read."""
        return True

    def no_longer_restarting(self) -> None:
        """Clear the restart flag after the first step of a resumed run.

        Otherwise schedules that follow a metric are not updated at the end of this epoch. This loop's own flag is
        cleared before, if the run continued in a validation.
        """
        if self.trainer.fit_loop._restarting:
            self.trainer.fit_loop._restarting = False

    def resumes_in_validation(self, data_fetcher: Any) -> bool:
        """Check whether the run continues from a checkpoint that a validation saved, so that no step comes first.

        This is a part of Lightning's `advance`.
        """
        if self.restarting and self._should_check_val_fx(data_fetcher):
            if self.val_loop.restarted_mid_evaluation:
                return True
            if self.restarted_on_last:
                self._skip_next_val = True
                return True
            self.val_loop.increment_progress_to_evaluation_end()
        if self.val_loop.restarting:  # the assignment looks at all attributes of a loop
            self.val_loop.restarting = False
        return False

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Update schedules that follow a metric once per step, before the step is saved; see `follow_metrics`.

        The other schedules are updated as Lightning does, but by `call_of_module`.
        """
        trainer = self.trainer
        follows = any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
        if update_plateau_schedulers:
            if follows and self._followed[interval] != self.global_step:
                self._followed[interval] = self.global_step
                super().update_lr_schedulers(interval, update_plateau_schedulers=True)
            return
        number = 1 + (self.batch_idx if interval == "step" else trainer.current_epoch)
        for config in trainer.lr_scheduler_configs:
            if config.interval == interval and number % config.frequency == 0 and not config.reduce_on_plateau:
                self.scheduler_progress.increment_ready()
                call_of_module(trainer, "lr_scheduler_step", config.scheduler, None)
                self.scheduler_progress.increment_completed()
        if interval == "step" and follows and not validation_or_epoch_end_follows(trainer):
            self.update_lr_schedulers("step", update_plateau_schedulers=True)

    def follow_metrics(self) -> None:
        """Update schedules that follow a metric, before a step or the end of an epoch is saved.

        Lightning updates them after it has saved, so a resumed run would miss the update.
        """
        self.update_lr_schedulers("step", update_plateau_schedulers=True)
        if self._num_ready_batches_reached() and not self.trainer.fit_loop.restarting:
            self.update_lr_schedulers("epoch", update_plateau_schedulers=True)

    def look_at_clock(self) -> None:
        """Find out whether a validation is due after the step just taken, if a time is the interval between them.

        The clock of rank zero decides, so that all ranks validate after the same step. Several ranks look at it about
        once a second; at each look they agree on the step of the next one.

        See it: val_check_interval="00:00:00:10" with ddp; each rank of Lightning reads its own clock.
        """
        trainer, step = self.trainer, self.global_step
        if trainer._val_check_time_interval is None:
            return
        self.validation_is_due = False
        if step < self._next_look:
            return
        now, (before, then) = time.monotonic(), self._last_look
        left, steps = trainer._val_check_time_interval - (now - trainer._last_val_time), 1
        if trainer.world_size > 1:
            per_second = (step - before) / max(now - then, 1e-3)
            steps = max(1, min(1000, int(per_second * min(left, SECONDS_BETWEEN_LOOKS))))
            left, steps = broadcast_from_rank_zero((left, steps))
        self.validation_is_due, self._next_look, self._last_look = left <= 0, step + steps, (step, now)

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        """Validate also after the last step of a config's run, inside an epoch, so that its weights have a result."""
        if not self._should_check_val_epoch():
            return False
        trainer = self.trainer
        if trainer._val_check_time_interval is None:
            return super()._should_check_val_fx(data_fetcher) or _last_validation_follows(trainer)
        stops = trainer.should_stop and trainer.fit_loop._can_stop_early
        return bool(stops or self.validation_is_due or _last_validation_follows(trainer))


@contextmanager
def unchanged(trainer: Any) -> Iterator[None]:
    """Return a context after which the module's tensors and the options of the optimizer's groups are as before."""
    tensors = SavedTensors(trainer.lightning_module)
    groups = [group for each in trainer.optimizers for group in each.param_groups]
    options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    yield
    tensors.restore()
    for group, values in zip(groups, options, strict=True):
        group |= values


def is_last_step(trainer: pl.Trainer) -> bool:
    """Check whether the step just taken is the last one of the run."""
    last_epoch = trainer.current_epoch + 1 == trainer.max_epochs
    return trainer.global_step == trainer.max_steps or (last_epoch and trainer.is_last_batch)


def _last_validation_follows(trainer: pl.Trainer) -> bool:
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
            return _last_validation_follows(trainer)
        step = trainer.fit_loop.epoch_loop.batch_idx + 1
    if trainer._val_check_time_interval is not None:  # type: ignore[attr-defined]
        due = trainer.fit_loop.epoch_loop.validation_is_due  # type: ignore[attr-defined]
        return due or _last_validation_follows(trainer)
    return step % int(trainer.val_check_batch or 1) == 0 or _last_validation_follows(trainer)
