"""One optimizer step in Lightning's loop: its hooks, schedules and progress counters, with our passes between them."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lockstep.errors import StepRefused, UserError
from lockstep.launch.failures import ENDS, refused_end
from lockstep.lightning.epochs import StepEpochLoop, validation_or_epoch_end_follows
from lockstep.lightning.hooks import call_hook, call_of_module, call_of_strategy, overrides_method
from lockstep.lightning.strategy import Hooks
from lockstep.step.batch import MicroBatch, data_of
from lockstep.step.gradients import GradientSum
from lockstep.step.hook import StepHook
from lockstep.step.memory import optimizer_memory_advice
from lockstep.step.outputs import Outputs
from lockstep.step.passes import StepPasses
from lockstep.step.step import Step


class StepLoop(StepEpochLoop):
    """Lightning's training epoch loop, with our own optimizer step.

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

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return the loop's state with that of the gradient sums."""
        begun = self.trainer.state.fn is not None  # else there are no data yet, on which the sums depend
        return {**super().on_save_checkpoint(), **(self.passes.state_dict() if begun else {})}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Restore the loop's state and that of the gradient sums."""
        super().on_load_checkpoint(state_dict)
        self.passes.load_state_dict(state_dict)

    def on_run_start(self, data_fetcher: Any) -> None:
        """Find out once which arguments `training_step` takes. Check the parameters."""
        super().on_run_start(data_fetcher)
        self.trainer.saves.save_waiting()  # what the hooks of the epoch's start have asked for
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
        if self.resumes_in_validation(data_fetcher):  # then the validation comes first
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
        try:
            self._take_step(step_batch)
        except ENDS as end:  # of user code
            raise refused_end(end) from end

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
        self.no_longer_restarting()
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
