"""The forward and backward passes of one optimizer step, and what is summed over its pieces."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lockstep.arithmetic.order import batch_seed, piece_seed
from lockstep.errors import UserError
from lockstep.step.batch import MicroBatch, StepBatch
from lockstep.step.batch_norm import BatchNormStats
from lockstep.step.gradients import GradientSum, gather_exponents
from lockstep.step.hooks import StepHook
from lockstep.step.memory import out_of_memory_advice
from lockstep.step.protocols import Action, StepData, StepStrategy, data_of

Outputs = dict[str, Tensor]


def one_by_one(count: int) -> Iterator[tuple[Action, int]]:
    """Yield the order of passes on one device: the backward pass of each micro-batch follows its forward pass."""
    for number in range(count):
        yield Action.FORWARD, number
        yield Action.BACKWARD, number


class StepPasses:
    """Compute the gradient of a step from its micro-batches.

    Args:
        gradients: how the gradients of a step's pieces are summed.
        hooks: what takes part in each step beside.
        seed: the run's seed; what is random inside a piece follows from it, the step and the piece.
    """

    def __init__(self, gradients: GradientSum, hooks: Sequence[StepHook], seed: int) -> None:
        self.gradients = gradients
        self.hooks = hooks
        self.seed = seed
        self._restored: list[int | None] = []  # the grids of the statistics' exact sums

    @cached_property
    def statistics(self) -> BatchNormStats:
        """Made when the module is where it will stay."""
        return BatchNormStats(self.gradients, self._restored)

    def run(
        self, trainer: Any, step_batch: StepBatch, forward: Callable[[Any], Any], backward: Callable[[Tensor], Any]
    ) -> Outputs:
        """Add the gradient of the mean loss over the whole step's samples to the parameters', which are zero or none.

        Args:
            forward: from a micro-batch's batch to what `training_step` returns.
            backward: takes a loss, weighted by what its micro-batch counts for.

        Returns:
            `loss` and the other numbers that `training_step` returned beside it, each the mean over this process's
            samples, on its device. Of a process without a sample, a loss of 0.
        """
        step = Step(self, trainer, step_batch, forward, backward)
        gradients, statistics = self.gradients, self.statistics
        try:
            for hook in self.hooks:
                hook.before_step(step)
            statistics.begin(step_batch)
            gradients.begin(step_batch)
            for action, number in step.strategy.schedule(step_batch.micro_batches):
                if action is Action.FORWARD:
                    statistics.before()
                    gradients.before_piece(number, step_batch)
                    step.forward(number)
                    statistics.after()
                else:
                    step.backward(number)
                    for hook in self.hooks:
                        hook.after_piece(step, step_batch.micro_batches[number])
                    gradients.collect(number, step_batch)
            for hook in self.hooks:
                hook.after_passes(step)
            statistics.finish(step_batch)
            if due := gradients.reduce(step):
                self.before_optimizer_step(due)
        except Exception as error:
            for hook in self.hooks:
                hook.on_error(step, error)
            advised = out_of_memory_advice(error, step_batch, step.data.layout)
            if advised and isinstance(error, RuntimeError | MemoryError):
                raise UserError(advised) from error
            raise
        if trainer.is_last_batch or trainer.global_step + 1 == trainer.max_steps:
            self.flush()
        return step.means()

    def before_optimizer_step(self, step: "Step") -> None:
        """Call the hooks before an optimizer step with the gradient of `step`."""
        for hook in self.hooks:
            hook.before_optimizer_step(step)

    def after_optimizer_step(self, step_batch: StepBatch, trainer: Any) -> None:
        """Call the hooks after an optimizer step."""
        step = Step(self, trainer, step_batch)
        for hook in self.hooks:
            hook.after_optimizer_step(step)

    def flush(self) -> None:
        """Wait for what the hooks know later."""
        for hook in self.hooks:
            hook.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return what later steps follow from: the gradient sum's state and, under exact, the statistics' grids."""
        self.flush()
        gradients = self.gradients.state_dict()
        state: dict[str, Any] = {"gradients": gradients} if gradients else {}
        if (exact := self.statistics.exact) is not None:
            state["statistics"] = gather_exponents(self.gradients.strategy, exact.exponents, exact)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what a checkpoint of any layout held."""
        self.gradients.load_state_dict(state.get("gradients", {}))
        self._restored = list(state.get("statistics", []))


class Step:
    """One optimizer step under way on this process.

    Attributes:
        batch: the samples that this process computes.
        losses: of its micro-batches, in the order of their backward passes, without their graphs.
    """

    def __init__(
        self,
        passes: StepPasses,
        trainer: Any,
        batch: StepBatch,
        forward: Callable[[Any], Any] | None = None,
        backward: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self.passes, self.trainer, self.batch = passes, trainer, batch
        self.strategy: StepStrategy = passes.gradients.strategy
        self._forward, self._backward = forward, backward
        self._under_way: dict[int, tuple[Any, Tensor]] = {}  # batches and losses between a forward and a backward pass
        self._outputs: list[Outputs] = []

    @property
    def number(self) -> int:
        """The optimizer step since the run began, 0-based."""
        return self.batch.step

    @property
    def module(self) -> Any:
        return self.strategy.lightning_module

    @property
    def data(self) -> StepData:
        return data_of(self.trainer)

    @property
    def losses(self) -> list[Tensor]:
        return [outputs["loss"] for outputs in self._outputs]

    def forward(self, number: int) -> None:
        """Compute the loss of a micro-batch; its graph is kept until `backward`."""
        micro_batch, strategy = self.batch.micro_batches[number], self.strategy
        batch = self._prepared(micro_batch)
        loss, outputs = self._numbers(batch, micro_batch)
        self._under_way[number] = batch, loss
        if not strategy.numbers_come_later:
            self._outputs.append(outputs)

    def backward(self, number: int) -> None:
        """Compute the gradient of a micro-batch, weighted by what it counts for."""
        micro_batch, strategy = self.batch.micro_batches[number], self.strategy
        batch, loss = self._under_way.pop(number)
        if strategy.numbers_come_later:
            with torch.no_grad():
                self._outputs.append(self._numbers(batch, micro_batch)[1])
        self._differentiate(loss, micro_batch)

    def compute(self, micro_batch: MicroBatch) -> None:
        """Compute the gradient of a micro-batch that is not one of this step's own, and keep no numbers of it."""
        loss, _ = self._numbers(self._prepared(micro_batch), micro_batch)
        self._differentiate(loss, micro_batch)

    def without_data(self) -> "Step":
        """Return this step with its numbers and sample ids alone, for hooks that see its gradient later."""
        micro_batches = [replace(each, batch=None, draws=None) for each in self.batch.micro_batches]
        step = Step(self.passes, self.trainer, replace(self.batch, micro_batches=micro_batches))
        step._outputs = self._outputs
        return step

    def means(self) -> Outputs:
        """Return the numbers of `training_step`, each the mean over the samples of the micro-batches that have it."""
        if not self._outputs:  # the loss may be logged, with the others'
            return {"loss": next(self.module.parameters()).new_zeros(())}
        if len(self._outputs) == 1:
            return self._outputs[0]
        sizes = [micro_batch.size for micro_batch in self.batch.micro_batches]
        samples = sum(sizes)
        return {
            name: torch.stack([each[name] * (n / samples) for each, n in zip(self._outputs, sizes, strict=True)]).sum()
            for name in self._outputs[0]
            if all(name in each for each in self._outputs)
        }

    def _numbers(self, batch: Any, micro_batch: MicroBatch) -> tuple[Tensor, Outputs]:
        """Run `training_step` on what `_prepared` has made: the piece's seed is set after it has drawn."""
        assert self._forward is not None
        with self.strategy.micro_batch(micro_batch, piece_seed(self.passes.seed, self.batch.step, micro_batch.piece)):
            return numbers_of(self._forward(batch))

    def _differentiate(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        assert self._backward is not None
        weight = 1.0
        if not self.strategy.numbers_come_later:  # else the gradient that arrives is weighted
            weight = self.passes.gradients.weight(micro_batch, self.batch)
        self._backward(loss if weight == 1 else loss * weight)

    def _prepared(self, micro_batch: MicroBatch) -> Any:
        """Return what `training_step` gets: samples mixed, then changed by the module's `on_after_batch_transfer`."""
        data, module = self.data, self.module
        batch = data.finish(micro_batch)
        changes = [data.mix] if data.mixes else []
        if overrides_method(module, "on_after_batch_transfer", pl.LightningModule):
            changes.append(partial(module.on_after_batch_transfer, dataloader_idx=0))
        if not changes:
            return batch
        self.strategy.seed(batch_seed(self.passes.seed, self.batch.step, micro_batch.piece))
        for change in changes:
            batch = change(batch)
        return batch


def overrides_method(owner: Any, name: str, base: type) -> bool:
    """Whether `owner`, or its class, has a method `name` other than that of `base`."""
    return getattr(getattr(owner, name), "__func__", None) is not getattr(base, name)


def numbers_of(output: Any) -> tuple[Tensor, Outputs]:
    """Return the loss that `training_step` returned, with its graph; and by name all numbers, without.

    Raises:
        UserError: there is no loss.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        returned = "a dict without a tensor 'loss'" if isinstance(output, Mapping) else type(output).__name__
        why = "a piece of a step can't be left out; return its loss, or a dict with it under 'loss'"
        raise UserError(f"training_step returned {returned}: {why}")
    if loss.numel() != 1:
        raise UserError(f"training_step returned a loss of shape {list(loss.shape)}: it must be one number, their mean")
    numbers = {"loss": loss.detach().reshape(())}
    for name, value in output.items() if isinstance(output, Mapping) else ():
        if isinstance(value, Tensor) and value.numel() == 1:
            numbers[name] = value.detach().reshape(())
        elif isinstance(value, int | float):
            numbers[name] = torch.full((), float(value), device=loss.device)
    return loss, numbers
