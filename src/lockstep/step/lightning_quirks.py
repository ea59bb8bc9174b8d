"""What Lightning 2.6 does otherwise than a run of steps needs, each in one place, so that it can be dropped alone.

Every class or method names the behaviour and how to see it. tests/step/test_loop.py and
tests/test_promise_5_evaluation.py fail when the private names used here change.
"""

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from lockstep.step.batch import StepBatch
from lockstep.step.evaluation_logs import EvaluationLogs
from lockstep.step.protocols import data_of


class NoSignals(_SignalConnector):
    """No signal handlers.

    See it: SIGTERM to one rank of a ddp run while the others are in a collective; all hang.
    """

    def register_signal_handlers(self) -> None:
        """Lightning's handler of SIGTERM broadcasts, wherever the other ranks are: they hang. Ours only remembers."""


class StepLogs(_LoggerConnector):
    """How means are weighted, what an evaluation shows, and at which step."""

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """A mean that a hook logs is weighted by samples, which Lightning can't count in a step's batch."""
        super().on_batch_start(batch, dataloader_idx)
        if isinstance(batch, StepBatch):
            results: Any = self.trainer._results
            results.batch_size = batch.num_local_samples

    def update_eval_epoch_metrics(self) -> Any:
        """Lightning would show what rank zero has logged. All ranks call this, after an evaluation's last batch, and
        after its last hook that may log."""
        trainer: Any = self.trainer
        results: EvaluationLogs = trainer._results
        several = trainer.world_size > 1 and not trainer.strategy.staged  # every stage sees all samples
        samples = data_of(trainer).samples_here("test" if trainer.testing else "val") if several else 1
        results.reduce(gather_objects if several else lambda value: [value], samples, trainer.strategy.reduce)
        return super().update_eval_epoch_metrics()

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Show what `self.log` was given at its own step. Lightning counts that step later, and so shows it one step
        early: in a resumed run what was lost would stay beside what is made anew.

        See it: `self.log("x", ...)` in `training_step` with log_every_n_steps=1; the first point is at step 0.
        """
        loop = self.trainer.fit_loop.epoch_loop
        counted, loop._batches_that_stepped = loop._batches_that_stepped, loop.global_step
        super().log_metrics(metrics, step)
        loop._batches_that_stepped = counted


def gather_objects(value: Any) -> list[Any]:
    """Every rank's argument, in the order of the ranks."""
    ranks = [value] * dist.get_world_size()
    dist.all_gather_object(ranks, value)
    return ranks


class StepFitLoop(_FitLoop):
    """Epochs are counted once.

    See it: a run with max_steps that is resumed from a checkpoint of an epoch's end; `current_epoch` is one too large.
    """

    def _iteration_based_training(self) -> bool:
        return False


class StepEpochLoop(_TrainingEpochLoop):
    """A run that is resumed takes the same steps, epochs and schedules as one that was not stopped."""

    trainer: Any

    def __init__(self, trainer: pl.Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self._followed: dict[str, int] = {}  # by interval, the step after which what follows a metric was moved last

    @property
    def global_step(self) -> int:
        return self.automatic_optimization.optim_progress.optimizer_steps

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Reopen an epoch that `max_steps` has cut short: Lightning has counted it, and would leave the rest out.

        See it: max_steps=5 of epochs of 4 steps, resumed with max_steps=8; the second epoch has one step.
        """
        super().on_load_checkpoint(state_dict)
        fit_loop = self.trainer.fit_loop
        fit_loop._combined_loader = None  # made early, for `estimated_stepping_batches`: at another step
        cut = self.batch_progress.current.completed < data_of(self.trainer).order.steps_per_epoch
        if cut and not self.batch_progress.is_last_batch:
            for count in (fit_loop.epoch_progress.current, fit_loop.epoch_progress.total):
                count.processed = count.completed

    def on_run_start(self, data_fetcher: Any) -> None:
        """Call the module's `on_train_epoch_start` also where a run continues inside an epoch. (Not the callbacks':
        they may not expect it twice.)

        See it: a module that resets a counter there, resumed inside an epoch.
        """
        super().on_run_start(data_fetcher)
        self._batches_that_stepped = self.global_step
        self._followed = dict.fromkeys(("step", "epoch"), self.global_step)
        if self.trainer.fit_loop.restarted_mid_epoch:
            call._call_lightning_module_hook(self.trainer, "on_train_epoch_start")

    def no_longer_restarting(self) -> None:
        """After the first step of a resumed run, else what follows a metric is not moved at this epoch's end."""
        if self.restarting:
            self.trainer.fit_loop._restarting = False

    def continues_after_validation(self, data_fetcher: Any) -> bool:
        """Whether the run continues from a checkpoint of a validation, so that no step comes first. As in the `advance`
        of Lightning."""
        if self.restarting and self._should_check_val_fx(data_fetcher):
            if self.val_loop.restarted_mid_evaluation:
                return True
            if self.restarted_on_last:
                self._skip_next_val = True
                return True
            self.val_loop.increment_progress_to_evaluation_end()
        self.val_loop.restarting = False
        return False

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Moves what follows a metric once, and before a step is saved: see `follow_metrics`."""
        if update_plateau_schedulers:
            if self._followed[interval] != self.global_step:
                self._followed[interval] = self.global_step
                super().update_lr_schedulers(interval, update_plateau_schedulers=True)
            return
        super().update_lr_schedulers(interval, update_plateau_schedulers=False)
        follows = any(config.reduce_on_plateau for config in self.trainer.lr_scheduler_configs)
        if interval == "step" and follows and not validates(self.trainer):
            self.update_lr_schedulers("step", update_plateau_schedulers=True)

    def follow_metrics(self) -> None:
        """Before a step, or an epoch's end, is saved: moves schedules that follow a metric. Lightning does so
        afterwards, and a run resumed from there would leave it out."""
        self.update_lr_schedulers("step", update_plateau_schedulers=True)
        if self._num_ready_batches_reached() and not self.trainer.fit_loop.restarting:
            self.update_lr_schedulers("epoch", update_plateau_schedulers=True)

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        """A run's last step has it too, wherever in an epoch it falls: what a run ends with is judged."""
        ends = is_last_step(self.trainer) and self._should_check_val_epoch()
        return super()._should_check_val_fx(data_fetcher) or ends


def forget_logged(trainer: pl.Trainer) -> None:
    """Resets what `self.log` was given of the evaluation batch just done."""
    for result in (trainer._results or {}).values():
        if not result.has_reset:  # others were logged by an evaluation before
            result.reset()
            result.has_reset = False  # else Lightning takes it for not logged, and other ranks wait for this one


def is_last_step(trainer: pl.Trainer) -> bool:
    """Whether the step just taken is the run's last."""
    last_epoch = trainer.current_epoch + 1 == trainer.max_epochs
    return trainer.global_step == trainer.max_steps or (last_epoch and trainer.is_last_batch)


def validates(trainer: pl.Trainer) -> bool:
    """Whether validation, or an epoch's end, follows the step just taken. A checkpoint waits for it: a run resumed from
    one that did not would leave it out, and the best checkpoint and the epoch's means with it."""
    if trainer.is_last_batch:
        return True
    if not (trainer.enable_validation and any(trainer.num_val_batches)):
        return False
    inside = trainer.check_val_every_n_epoch is None and trainer.global_step % int(trainer.val_check_batch or 1) == 0
    return inside or is_last_step(trainer)
