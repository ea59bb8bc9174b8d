"""The loop over an epoch's steps: the hooks, schedules and progress counters of each, with our passes between them."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from torch import Tensor

from lockstep.errors import StepRefused, UserError
from lockstep.launch.failures import no_silent_end
from lockstep.launch.process_group import broadcast_from_rank_zero, gather_objects
from lockstep.lightning.epochs import last_validation_follows, validation_or_epoch_end_follows
from lockstep.lightning.evaluations import watched_loop
from lockstep.lightning.hooks import call_hook, call_of_module, call_of_strategy, overrides_method
from lockstep.lightning.strategy import Hooks
from lockstep.step.batch import MicroBatch, data_of
from lockstep.step.gradients import GradientSum
from lockstep.step.hook import StepHook
from lockstep.step.memory import optimizer_memory_advice
from lockstep.step.outputs import Outputs
from lockstep.step.passes import StepPasses
from lockstep.step.step import Step
from lockstep.step.trial import SavedTensors

SECONDS_BETWEEN_LOOKS = 1.0  # of several ranks at rank zero's clock, if a time is the interval between validations


class StepLoop(_TrainingEpochLoop):
    """Lightning's training epoch loop, with our own optimizer step.

    A resumed run has the same steps, epochs and schedules as a run that was not stopped.

    Args:
        trainer: the trainer.
        gradients: see `StepTrainer`.
        hooks: see `StepTrainer`.
        seed: see `StepTrainer`.
        min_steps: see Lightning's loop.
        max_steps: see Lightning's loop.

    Attributes:
        passes: computes a step's gradient.
    """

    trainer: Any
    _results: Any

    def __init__(
        self,
        trainer: pl.Trainer,
        gradients: GradientSum,
        hooks: Sequence[StepHook],
        seed: int,
        min_steps: int | None,
        max_steps: int,
    ) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.passes = StepPasses(trainer, gradients, hooks, seed, self._forward_pass, self._backward_pass)
        self._takes_batch_idx = True  # whether `training_step` takes `batch_idx`
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
        """Return the loop's state: with that of the sums, and what was logged since an epoch that goes on began."""
        state, results, trainer = super().on_save_checkpoint(), self._results, self.trainer
        if trainer.state.fn == "fit" and not self._num_ready_batches_reached():
            gather = (lambda value: [value]) if results.alone else gather_objects
            if logged := results.state(gather):
                state["logged"] = logged
        begun = trainer.state.fn is not None  # else there are no data yet, on which the sums depend
        return {**state, **(self.passes.state_dict() if begun else {})}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, and reopen an epoch that `max_steps` ended early: Lightning would skip its rest.

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
        self.passes.load_state_dict(state_dict)

    def on_run_start(self, data_fetcher: Any) -> None:
        """Call the module's `on_train_epoch_start` also if a run continues inside an epoch. Check the parameters.

        The hook may set Python attributes, which no checkpoint has. What it does to tensors and to the optimizer's
        groups is in the checkpoint already, so this is undone. Callbacks are left out, since they have their own state.
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
                self.seed_hooks(Hooks.EPOCH_START, self.trainer.current_epoch)
                call._call_lightning_module_hook(self.trainer, "on_train_epoch_start")
        self.trainer.saves.save_waiting()  # what the hooks of the epoch's start have asked for
        # which arguments `training_step` takes
        self._takes_batch_idx = "batch_idx" in self._build_kwargs(OrderedDict(), None, 0)
        self.passes.begin_epoch()

    def advance(self, data_fetcher: Any) -> None:
        """Take one optimizer step with its hooks, schedules and progress counters.

        Raises:
            StopIteration: no batch is left of a limited number.
            StepRefused: the loader has ended early, or an `on_train_batch_start` returned -1, by which Lightning skips
                the rest of the epoch.
        """
        self.trainer.saves.begin_step()
        if self._resumes_in_validation(data_fetcher):  # then the validation comes first
            return
        trainer = self.trainer
        trainer.hook_finder.begin_step()
        try:
            step_batch = next(data_fetcher)[0]
        except StopIteration as end:
            steps = data_of(trainer).order.steps_per_epoch
            if trainer.num_training_batches != steps:  # a limit of batches
                raise
            raise StepRefused(
                f"epoch {trainer.current_epoch} has {self.batch_idx + 1} of {steps} steps, though nothing has asked "
                "for a stop: the loader must yield all steps"
            ) from end
        self.batch_progress.is_last_batch = data_fetcher.done
        with no_silent_end():  # of user code
            self._take_step(step_batch)

    def _resumes_in_validation(self, data_fetcher: Any) -> bool:
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

    def seed_hooks(self, hooks: Hooks, number: int) -> None:
        """Seed the random numbers of hooks; see `StepStrategy.seed_hooks`."""
        self.trainer.strategy.seed_hooks(self.passes.seed, hooks, number)

    def _take_step(self, step_batch: Any) -> None:
        """Take one optimizer step, see `advance`."""
        trainer, progress, connector = self.trainer, self.batch_progress, self.trainer._logger_connector
        step_batch = data_of(trainer).transfer_batch_to_device(step_batch, trainer.strategy.root_device, 0)
        progress.increment_ready()
        connector.on_batch_start(step_batch)
        step = self.passes.new_step(step_batch)
        step_batch.put_together = step.put_together
        self.seed_hooks(Hooks.STEP_START, step_batch.step)
        if call_hook(trainer, "on_train_batch_start", step_batch, self.batch_idx) == -1:
            raise StepRefused(
                "on_train_batch_start returned -1, but the rest of an epoch can't be skipped, since the number of a "
                "step gives its samples: set trainer.should_stop=True to end the run"
            )
        if step_batch.was_changed:
            raise UserError(
                "an on_train_batch_start changes the batch in place, which is put together for hooks only: change it "
                "in on_after_batch_transfer, which gets the batch of each piece"
            )
        progress.increment_started()
        trainer.saves.incomplete = True
        with trainer.profiler.profile("run_training_batch"):
            outputs = self._step(step)
        progress.increment_processed()
        self.look_at_clock()
        if connector.step_is_read:
            connector.reduce_step()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        # Else schedules that follow a metric are not updated at the end of a resumed epoch. This loop's own flag is
        # cleared before, if the run continued in a validation.
        if trainer.fit_loop._restarting:
            trainer.fit_loop._restarting = False
        call_hook(trainer, "on_train_batch_end", outputs, step_batch, self.batch_idx)
        step_batch.put_together = None  # it refers to the step, which refers to the batch
        if not validation_or_epoch_end_follows(trainer):
            trainer.saves.complete_step()
        connector.on_batch_end()
        progress.increment_completed()
        connector.update_train_step_metrics()

    def _step(self, step: Step) -> Outputs:
        """Run the module's `optimizer_step` with the passes of a step as its closure.

        Returns:
            The outputs that `on_train_batch_end` gets.

        Raises:
            UserError: the module's `optimizer_step` did not call the closure.
            StepRefused: the passes or the optimizer ran out of memory.
        """
        progress = self.automatic_optimization.optim_progress.optimizer.step
        outputs: Outputs = {}

        def closure() -> Tensor:
            with torch.enable_grad():
                self._zero_grad()  # now, so that memory never has both the last gradients and the activations
                outputs.update(self.passes.run(step))
            self.seed_hooks(Hooks.AFTER_PASSES, step.number)
            self.trainer._logger_connector.reduce_step(early=True)
            return outputs["loss"]

        progress.increment_ready()
        try:
            self.run_optimizer(closure)
        except (RuntimeError, MemoryError) as error:  # of the optimizer: `passes.run` handles its own
            advised = optimizer_memory_advice(error, step.number, step.data.layout, step.strategy.less_memory)
            if not advised:
                raise
            raise StepRefused(advised) from error
        progress.increment_completed()
        if not outputs:
            kind = type(self.trainer.lightning_module).__name__
            raise UserError(f"{kind}.optimizer_step did not call its closure: it must call it once")
        return self.passes.returned(step, outputs)

    def run_optimizer(self, closure: Callable[[], Tensor]) -> None:
        """Run the module's `optimizer_step`, without counting a step. `closure` sets gradients and returns the loss."""
        args = (self.trainer.current_epoch, self.batch_idx, self.trainer.lightning_module.optimizers(), closure)
        call_of_module(self.trainer, "optimizer_step", *args)

    def _zero_grad(self) -> None:
        """Run the module's `optimizer_zero_grad`, with the hook before it."""
        progress, optimizer = self.automatic_optimization.optim_progress.optimizer.zero_grad, self.trainer.optimizers[0]
        progress.increment_ready()
        call_hook(self.trainer, "on_before_zero_grad", optimizer)
        progress.increment_started()
        module = self.trainer.lightning_module
        if overrides_method(module, "optimizer_zero_grad", pl.LightningModule) or overrides_method(
            optimizer, "zero_grad", torch.optim.Optimizer
        ):
            module.optimizer_zero_grad(self.trainer.current_epoch, self.batch_idx, optimizer)
        else:  # torch's `zero_grad` does the same within a mark for its profiler, which takes 12 us
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        progress.increment_completed()

    def _forward_pass(self, batch: Any, micro_batch: MicroBatch) -> Any:
        """Run `training_step` on the data of a micro-batch. Return its result."""
        args = (batch, self.batch_idx) if self._takes_batch_idx else (batch,)
        with self._results.of_piece(micro_batch.piece, micro_batch.size, forward=True):
            return call_of_strategy(self.trainer, "training_step", *args)

    def _backward_pass(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        """Run the backward pass of a weighted loss."""
        with self._results.of_piece(micro_batch.piece, micro_batch.size):
            call_of_strategy(self.trainer, "backward", loss, self.trainer.optimizers[0])

    # --- between the steps ---

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Validate if it is due."""
        with no_silent_end():
            super().on_advance_end(data_fetcher)

    def _accumulated_batches_reached(self) -> bool:
        """Return True, since a batch of this loop is a whole step; `accumulate_grad_batches` is for users to read."""
        return True

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
            return super()._should_check_val_fx(data_fetcher) or last_validation_follows(trainer)
        stops = trainer.should_stop and trainer.fit_loop._can_stop_early
        return bool(stops or self.validation_is_due or last_validation_follows(trainer))


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
