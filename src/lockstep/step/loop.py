"""Lightning's Trainer, over batches that are optimizer steps made of pieces.

A batch that the loader yields is a `StepBatch`: what this process computes of one optimizer step. So everything that
Lightning counts in batches (validation, logging, limits, checkpoints) counts optimizer steps.

The private names of Lightning that the project builds on stand in this file and in step/evaluation_logs.py;
tests/step/test_loop.py fails when they change:

- `_TrainingEpochLoop`: `advance` makes a step; its `_results` and `_build_kwargs`, its `_batches_that_stepped`, and the
  `optim_progress` of its `automatic_optimization`, which counts steps.
- `_FitLoop`: its `_iteration_based_training`, `_restarting` and `_combined_loader`, where a run goes on.
- `_LoggerConnector` (how a mean that `self.log` takes is weighted, at which step it is shown, and the `meta` of what
  was logged), the `_results` of an `_EvaluationLoop`, and `_SignalConnector` (who hears signals).
- `call`, which calls hooks: under a profiler, and so that `self.log` knows which one runs.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch import Tensor

from lockstep.errors import UserError
from lockstep.step.batch import StepBatch
from lockstep.step.evaluation_logs import EvaluationLogs
from lockstep.step.gradients import GradientSum
from lockstep.step.hooks import StepHook
from lockstep.step.passes import Outputs, StepPasses, overrides


class StepTrainer(pl.Trainer):
    """Lightning's Trainer, whose training batches are optimizer steps made of pieces.

    Args:
        gradients, hooks, seed: as of `StepPasses`; the strategy of the gradients is the Trainer's.
        options: Lightning's own.
    """

    def __init__(self, gradients: GradientSum, hooks: Sequence[StepHook], seed: int, **options: Any) -> None:
        super().__init__(strategy=gradients.strategy, use_distributed_sampler=False, **options)
        self.gradients = gradients
        gradients.strategy.hooks = hooks
        self._signal_connector = _NoSignals(self)
        self._logger_connector = _StepLogs(self)
        made = self.fit_loop
        self.fit_loop = _StepFitLoop(self, made.min_epochs, made.max_epochs)
        passes = StepPasses(gradients, hooks, seed)
        self.fit_loop.epoch_loop = StepLoop(self, passes, made.min_steps, made.max_steps)
        for loop in (self.fit_loop.epoch_loop.val_loop, self.validate_loop, self.test_loop):
            loop._results = EvaluationLogs()


class _NoSignals(_SignalConnector):
    def register_signal_handlers(self) -> None:
        """Lightning's handler of SIGTERM broadcasts, wherever the other ranks are: they hang. Ours only remembers."""


class _StepLogs(_LoggerConnector):
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
        samples = trainer.datamodule.samples_here("test" if trainer.testing else "val") if several else 1
        results.reduce(_gather_objects if several else lambda own: [own], samples, trainer.strategy.reduce)
        return super().update_eval_epoch_metrics()

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Shows what `self.log` was given at the step that it is of. Lightning counts that step later, and so shows it
        one step early: where a run was killed and resumed, what is lost would stay beside what is made anew."""
        loop = self.trainer.fit_loop.epoch_loop
        counted, loop._batches_that_stepped = loop._batches_that_stepped, loop.global_step
        super().log_metrics(metrics, step)
        loop._batches_that_stepped = counted


def _gather_objects(own: Any) -> list[Any]:
    """Every rank's argument, in the order of the ranks."""
    ranks = [own] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return ranks


class _StepFitLoop(_FitLoop):
    epoch_loop: "StepLoop"

    def _iteration_based_training(self) -> bool:
        """With max_steps, Lightning takes an epoch that has ended for one to be resumed, and counts it twice."""
        return False


class StepLoop(_TrainingEpochLoop):
    """Lightning's training epoch loop, with a step of ours for every module."""

    trainer: Any

    def __init__(self, trainer: pl.Trainer, passes: StepPasses, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.passes = passes
        self._hears_zero_grad = True  # whether somebody has that hook: to ask everybody takes 20 us
        self._takes_number = True  # whether `training_step` takes the batch's number
        self._followed: dict[str, int] = {}  # by interval, the step after which what follows a metric was moved last

    def on_save_checkpoint(self) -> dict[str, Any]:
        return {**super().on_save_checkpoint(), **self.passes.state_dict()}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """An epoch that `max_steps` has cut short goes on: Lightning has counted it, and would leave the rest out."""
        super().on_load_checkpoint(state_dict)
        self.passes.load_state_dict(state_dict)
        fit_loop = self.trainer.fit_loop
        fit_loop._combined_loader = None  # made early, for `estimated_stepping_batches`: at another step
        cut = self.batch_progress.current.completed < self.trainer.datamodule.order.steps_per_epoch
        if cut and not self.batch_progress.is_last_batch:
            for count in (fit_loop.epoch_progress.current, fit_loop.epoch_progress.total):
                count.processed = count.completed

    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)
        self._batches_that_stepped = self.global_step
        self._followed = dict.fromkeys(("step", "epoch"), self.global_step)
        module, callbacks = self.trainer.lightning_module, self.trainer.callbacks
        owners = [(module, pl.LightningModule), *((callback, pl.Callback) for callback in callbacks)]
        self._hears_zero_grad = any(overrides(owner, "on_before_zero_grad", base) for owner, base in owners)
        self._takes_number = "batch_idx" in self._build_kwargs(OrderedDict(), None, 0)
        if self.trainer.fit_loop.restarted_mid_epoch:  # Lightning leaves it out; callbacks may not expect it twice
            call._call_lightning_module_hook(self.trainer, "on_train_epoch_start")

    def advance(self, data_fetcher: Any) -> None:
        """One step.

        Raises:
            StopIteration: no batch is left, or the module's `on_train_batch_start` returned -1.
        """
        if self._goes_on_after_validation(data_fetcher):
            return
        trainer, progress, connector = self.trainer, self.batch_progress, self.trainer._logger_connector
        step_batch, number = next(data_fetcher)[0], self.batch_idx + 1
        progress.is_last_batch = data_fetcher.done
        step_batch = trainer.datamodule.transfer_batch_to_device(step_batch, trainer.strategy.root_device, 0)
        progress.increment_ready()
        connector.on_batch_start(step_batch)
        skips_epoch = self._hook("on_train_batch_start", step_batch, number) == -1
        if skips_epoch:
            progress.increment_by(0, is_last_batch=True)
        else:
            progress.increment_started()
            with trainer.profiler.profile("run_training_batch"):
                outputs = self._step(step_batch, number)
        progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if skips_epoch:
            raise StopIteration
        if self.restarting:  # else what follows a metric would not be moved at this epoch's end
            trainer.fit_loop._restarting = False
        self._hook("on_train_batch_end", outputs, step_batch, number)
        connector.on_batch_end()
        progress.increment_completed()
        connector.update_train_step_metrics()

    def _goes_on_after_validation(self, data_fetcher: Any) -> bool:
        """As Lightning finds it: whether the run goes on from a checkpoint of a validation, so that no step comes."""
        if self.restarting and self._should_check_val_fx(data_fetcher):
            if self.val_loop.restarted_mid_evaluation:
                return True
            if self.restarted_on_last:
                self._skip_next_val = True
                return True
            self.val_loop.increment_progress_to_evaluation_end()
        self.val_loop.restarting = False
        return False

    def _step(self, step_batch: StepBatch, number: int) -> Outputs:
        """A whole optimizer step, by the module's `optimizer_step`; what of the step `on_train_batch_end` is told."""
        trainer, module, results = self.trainer, self.trainer.lightning_module, self._results
        optimizer = module.optimizers()
        counted = self.automatic_optimization.optim_progress.optimizer
        outputs: Outputs = {}

        def forward(batch: Any) -> Any:
            results.batch, results.batch_size = batch, None  # what `self.log` takes a mean's weight from
            args = (batch, number) if self._takes_number else (batch,)
            return call._call_strategy_hook(trainer, "training_step", *args)

        def backward(loss: Tensor) -> None:
            call._call_strategy_hook(trainer, "backward", loss, optimizer.optimizer)

        def zero_grad() -> None:
            counted.zero_grad.increment_ready()
            if self._hears_zero_grad:
                self._hook("on_before_zero_grad", optimizer.optimizer)
            counted.zero_grad.increment_started()
            module.optimizer_zero_grad(trainer.current_epoch, number, optimizer.optimizer)
            counted.zero_grad.increment_completed()

        @torch.enable_grad()
        def closure() -> Tensor:
            zero_grad()  # before the forward pass: gradients would lie beside its activations
            outputs.update(self.passes.run(trainer, step_batch, forward, backward))
            results.batch_size = step_batch.num_local_samples  # for hooks that log after the passes
            return outputs["loss"]

        counted.step.increment_ready()
        call._call_lightning_module_hook(trainer, "optimizer_step", trainer.current_epoch, number, optimizer, closure)
        counted.step.increment_completed()
        if not outputs:
            raise UserError(f"the optimizer_step of {type(module).__name__} did not call its closure: a step makes one")
        self.passes.after_optimizer_step(step_batch, trainer)
        return outputs

    def optimizer_step_with(self, prepare: Callable[[], object]) -> None:
        """Run the optimizer once more, with gradients that `prepare` gives the parameters. It counts as no step."""
        module = self.trainer.lightning_module

        def closure() -> Tensor:
            prepare()
            return torch.zeros(())

        step = (self.trainer.current_epoch, self.batch_idx, module.optimizers(), closure)
        call._call_lightning_module_hook(self.trainer, "optimizer_step", *step)

    def _hook(self, name: str, *args: Any) -> Any:
        """As Lightning does, the callbacks in their order, then the module; returns what the module's hook does."""
        call._call_callback_hooks(self.trainer, name, *args)
        return call._call_lightning_module_hook(self.trainer, name, *args)

    @property
    def global_step(self) -> int:
        return self.automatic_optimization.optim_progress.optimizer_steps

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
