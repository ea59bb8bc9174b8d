"""Lightning's training epoch loop, over batches that are optimizer steps.

A batch that the loader yields is a `StepBatch`: what this process computes of one optimizer step. So everything that
Lightning counts in batches (validation, logging, limits, checkpoints) counts optimizer steps, and no micro-batch is
ever seen outside step.py. The only private names of Lightning that the project builds on stand here, in step.py and
hooks.py: `_TrainingEpochLoop`, `_AutomaticOptimization` and `Closure` (how a step is made), its `_results` (with
what they are made of, in strategies/ddp.py) and `_batches_that_stepped`, the fit loop's `_iteration_based_training`,
`trainer._logger_connector` (what `self.log` needs, and at which step it is shown), and `trainer._signal_connector` (who
hears signals). tests/test_loop.py fails when they change.

Lightning's own path through a step costs 0.6 ms, which a small network feels. Where nobody needs what it offers
(`hooks.lean`), the same calls are made from here, to the same effect: a third of that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call

from lockstep.step.batch import StepBatch
from lockstep.step.finite import FiniteGradientCheck
from lockstep.step.gradients import GradientSum
from lockstep.step.hooks import Hooks, lean, overrides
from lockstep.step.optimization import StepOptimization


class StepLoop(_TrainingEpochLoop):
    """Lightning's training epoch loop, with optimizer steps made of pieces.

    Args:
        gradients: how the gradients of a step's pieces are summed.
        watch: what is done about a gradient that is not finite.
        seed: the run's seed; what is random inside a piece follows from it, the step and the piece.
    """

    def __init__(self, trainer: pl.Trainer, gradients: GradientSum, watch: FiniteGradientCheck, seed: int) -> None:
        super().__init__(trainer, trainer.fit_loop.min_steps, trainer.fit_loop.max_steps)
        self.automatic_optimization: StepOptimization = StepOptimization(trainer, gradients, watch, seed)
        # Lightning's handler of SIGTERM broadcasts, wherever the other ranks are: they hang. Ours only remembers.
        trainer._signal_connector.register_signal_handlers = _nothing  # type: ignore[method-assign]
        connector = trainer._logger_connector
        connector.log_metrics = partial(self._log_metrics, connector.log_metrics)  # type: ignore[method-assign]
        connector.on_batch_start = partial(self._on_batch_start, connector.on_batch_start)  # type: ignore[method-assign]
        # With max_steps, Lightning takes an epoch that has ended for one to be resumed, and counts it twice.
        trainer.fit_loop._iteration_based_training = _never  # type: ignore[method-assign]

        self.lean = False
        self.hooks: Hooks
        self._validates: bool | None = None  # whether this epoch does
        self._followed = False  # whether this epoch's end has moved what follows a metric
        self._followed_step = -1  # the step after which what follows one at each step was moved last

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """An epoch that `max_steps` has cut short goes on: Lightning has counted it, and would leave the rest out."""
        super().on_load_checkpoint(state_dict)
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        self.trainer.fit_loop._combined_loader = None  # made early, for `estimated_stepping_batches`: at another step
        epochs: Any = self.trainer.fit_loop.epoch_progress
        cut = self.batch_progress.current.completed < data.order.steps_per_epoch
        if cut and not self.batch_progress.is_last_batch:
            for count in (epochs.current, epochs.total):
                count.processed = count.completed

    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)
        self._batches_that_stepped = self.global_step
        self.lean = lean(self.trainer)
        self._validates = super()._should_check_val_epoch()
        self._followed, self._followed_step = False, self.global_step
        self.hooks = self.automatic_optimization.hooks = Hooks(self.trainer)
        if self.trainer.fit_loop.restarted_mid_epoch:  # Lightning leaves it out; callbacks may not expect it twice
            call._call_lightning_module_hook(self.trainer, "on_train_epoch_start")
        seen = overrides(self.trainer.lightning_module, "optimizer_zero_grad", pl.LightningModule)
        unseen = not seen and not self.hooks.anyone("on_before_zero_grad")
        self.automatic_optimization.zeroes_first = self.lean and unseen

    def advance(self, data_fetcher: Any) -> None:
        """One batch: Lightning's `advance`, without what nobody asked for.

        Raises:
            StopIteration: no batch is left, or the module's `on_train_batch_start` returned -1.
        """
        if self.restarting or not self.lean:
            (lean, self.lean), before = (self.lean, False), self.global_step
            try:
                super().advance(data_fetcher)
            finally:
                self.lean = lean
            if self.global_step > before:  # else what follows a metric would not be moved at this epoch's end
                self.trainer.fit_loop._restarting = False
            return
        trainer, hooks, progress = self.trainer, self.hooks, self.batch_progress
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if self.val_loop.restarting:
            self.val_loop.restarting = False
        batch, _, _ = next(data_fetcher)
        number = self.batch_idx + 1
        progress.is_last_batch = data_fetcher.done
        batch = data.transfer_batch_to_device(batch, trainer.strategy.root_device, 0)
        progress.increment_ready()
        connector, results = trainer._logger_connector, self._results
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, batch.num_local_samples, None
        if hooks("on_train_batch_start", batch, number) == -1:
            progress.increment_by(0, is_last_batch=True)
            progress.increment_processed()
            self._schedule()
            raise StopIteration
        progress.increment_started()
        outputs = self.automatic_optimization.step(batch, number)
        progress.increment_processed()
        self._schedule()
        hooks("on_train_batch_end", outputs, batch, number)
        logs = any(result.meta.on_step for result in results.values())
        if logs:
            connector.on_batch_end()
        results.batch = results.batch_size = None
        progress.increment_completed()
        if logs:
            connector.update_train_step_metrics()

    @property
    def global_step(self) -> int:
        return self.automatic_optimization.optim_progress.optimizer_steps

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        by_step, follows = interval == "step", update_plateau_schedulers
        done = follows and (self._followed_step == self.global_step if by_step else self._followed)
        if self.lean or done:  # `_schedule` has, or `follow_metrics`
            return
        if by_step and follows:
            self._followed_step = self.global_step
        super().update_lr_schedulers(interval, follows)
        if by_step and not follows and any(config.reduce_on_plateau for config in self.trainer.lr_scheduler_configs):
            self.trainer.callback_metrics  # noqa: B018  # takes down the step's, which a validation would hide
            if not validates(self.trainer):
                self.update_lr_schedulers(interval, update_plateau_schedulers=True)

    def follow_metrics(self) -> None:
        """Before a step, or an epoch's end, is saved: moves schedules that follow a metric. Lightning does so
        afterwards, and a run resumed from there would leave it out."""
        self.update_lr_schedulers("step", update_plateau_schedulers=True)
        if self._num_ready_batches_reached() and not self.trainer.fit_loop.restarting:
            self.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            self._followed = True

    def _should_accumulate(self) -> bool:
        """Never over batches: every one is a whole step."""
        return False

    def _should_check_val_epoch(self) -> bool:
        return super()._should_check_val_epoch() if self._validates is None else self._validates

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        """A run's last step has it too, wherever in an epoch it falls: what a run ends with is judged."""
        return super()._should_check_val_fx(data_fetcher) or (
            self._should_check_val_epoch() and is_last_step(self.trainer)
        )

    def _schedule(self) -> None:
        """Learning rates of the next step; an epoch's last step also moves what counts in epochs."""
        module, ended = self.trainer.lightning_module, self._num_ready_batches_reached()
        for config in self.trainer.lr_scheduler_configs:
            by_step = config.interval == "step"
            passed = self.batch_idx if by_step else self.trainer.current_epoch
            if (by_step or ended) and (passed + 1) % config.frequency == 0:
                self.scheduler_progress.increment_ready()
                module.lr_scheduler_step(config.scheduler, None)
                self.scheduler_progress.increment_completed()

    def _on_batch_start(self, on_batch_start: Callable[..., None], batch: Any, *args: Any) -> None:
        """A mean that a hook logs is weighted by samples, which Lightning can't count in a share."""
        on_batch_start(batch, *args)
        if isinstance(batch, StepBatch):
            self._results.batch_size = batch.num_local_samples

    def _log_metrics(self, log_metrics: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Shows what `self.log` was given at the step that it is of. Lightning counts that step later, and so shows it
        one step early: where a run was killed and resumed, what is lost would stay beside what is made anew."""
        counted, self._batches_that_stepped = self._batches_that_stepped, self.global_step
        log_metrics(*args, **kwargs)
        self._batches_that_stepped = counted

    def _broadcast_sigterm_tensor(self) -> None:
        """Lightning asks all ranks for a signal here, with a broadcast and a host-device sync at every batch; the
        Preemption callback does it about once a second."""


def is_last_step(trainer: pl.Trainer) -> bool:
    """Whether the step just taken is the run's last."""
    last_epoch = trainer.current_epoch + 1 == trainer.max_epochs
    return trainer.global_step == trainer.max_steps or (last_epoch and trainer.is_last_batch)


def validates(trainer: pl.Trainer) -> bool:
    """Whether validation, or an epoch's end, follows the step just taken. A checkpoint waits for it: a run resumed from
    one that did not would leave it out, and the best checkpoint and the epoch's means with it."""
    if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
        return True
    if not (trainer.enable_validation and any(trainer.num_val_batches)):
        return False
    inside = trainer.check_val_every_n_epoch is None
    return is_last_step(trainer) or (inside and trainer.global_step % int(trainer.val_check_batch or 1) == 0)


def _nothing() -> None:
    """In place of what Lightning would do."""


def _never() -> bool:
    return False
