"""One optimizer step: its forward and backward passes, and the hooks at fixed places between them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lockstep.arithmetic.order import preparation_seed, training_step_seed
from lockstep.errors import StepRefused
from lockstep.step.batch import MicroBatch, StepBatch, StepData, data_of
from lockstep.step.buffers import StepBuffers
from lockstep.step.gradients import GradientSum
from lockstep.step.memory import out_of_memory_advice
from lockstep.step.parameters import (
    check_parameters,
    gradient_versions,
    refuse_other_gradients,
    refuse_sparse_gradients,
)
from lockstep.step.strategy import Action, PieceStrategy, seed_device

Outputs = dict[str, Tensor]


class StepHook:
    """Methods that are called at fixed places of each step, on every process. Override those that you need.

    The order of a step: `before_step`; for each piece of this process its forward pass, its backward pass and
    `after_piece`; `after_passes`; the sum of the gradient over all processes; `before_optimizer_step`; the optimizer
    step; `after_optimizer_step`.
    """

    def before_step(self, step: "Step") -> None:
        """Act before the first pass."""

    def after_piece(self, step: "Step", micro_batch: MicroBatch) -> None:
        """Act after a backward pass.

        With exact=true, the parameters have the gradient of this piece. Otherwise they have the sum of the pieces so
        far.
        """

    def after_passes(self, step: "Step") -> None:
        """Act after the last pass, before `GradientSum.reduce`.

        It may communicate, since every process calls it, also one without a sample.
        """

    def before_optimizer_step(self, step: "Step") -> None:
        """Act after the sum: the parameters have the gradient of `step`, the same on all processes that share it."""

    def after_optimizer_step(self, step: "Step") -> None:
        """Act after the weights have changed."""

    def on_error(self, step: "Step", error: Exception) -> None:
        """Act after an error in the step's passes or sums. It may raise an error with a better message instead."""

    def before_weights_are_read(self) -> None:
        """Act before a validation and before the weights are saved. Every process calls this."""

    def flush(self) -> None:
        """Wait for delayed results and raise their errors.

        Called before a checkpoint, at the end of an epoch and at the end of the run.
        """


class StepPasses:
    """Compute the gradient of a step from its micro-batches; a micro-batch is one piece on this process.

    Args:
        trainer: the trainer.
        gradients: sums the gradients of a step's pieces.
        hooks: the hooks of each step.
        seed: the run's seed. The random numbers inside a piece depend on it, the step and the piece.
        forward: takes the data of a micro-batch and returns the result of `training_step`.
        backward: takes a weighted loss and runs its backward pass.
    """

    def __init__(
        self,
        trainer: Any,
        gradients: GradientSum,
        hooks: Sequence[StepHook],
        seed: int,
        forward: Callable[[Any], Any],
        backward: Callable[[Tensor], None],
    ) -> None:
        self.trainer = trainer
        self.gradients = gradients
        self.hooks = hooks
        self.seed = seed
        self.forward, self.backward = forward, backward
        self._restored_state: dict[str, Any] = {}  # the state from a checkpoint
        self._checks_gradients = True  # in the next step

    @cached_property
    def buffers(self) -> StepBuffers:
        """The module's buffers; made at first use, when the module is on its device."""
        return StepBuffers(self.gradients, self._restored_state)

    def begin_epoch(self) -> None:
        """Check the parameters, and the gradients of the epoch's first step.

        Raises:
            UserError: see `check_parameters`.
        """
        check_parameters(self.gradients, data_of(self.trainer).layout.pieces)
        self._checks_gradients = True

    def run(self, step: "Step") -> Outputs:
        """Compute the gradient of the mean loss over the whole step's samples, in the parameters' `.grad`.

        Returns:
            `loss` and the other numbers that `training_step` returned, each the mean over this process's samples, on
            its device. The loss of a process without a sample is 0.

        Raises:
            StepRefused: a pass ran out of memory, or `training_step` returned no loss.
        """
        gradients, buffers, step_batch = self.gradients, self.buffers, step.batch
        step.outputs = []  # an optimizer may run the passes of a step more than once
        try:
            for hook in self.hooks:
                hook.before_step(step)
            buffers.begin(step_batch)
            gradients.begin(step_batch)
            for action, index in step.strategy.schedule(step_batch.micro_batches):
                if action is Action.FORWARD:
                    buffers.before_forward()
                    checks = self._checks_gradients and not index
                    before = gradient_versions(step.module) if checks else {}
                    step.forward(index)
                    buffers.after_forward()
                    if checks:
                        refuse_other_gradients(before, step.module)
                else:
                    buffers.before_backward()
                    step.backward(index)
                    buffers.after_backward()
                    if self._checks_gradients:
                        refuse_sparse_gradients(gradients)
                    for hook in self.hooks:
                        hook.after_piece(step, step_batch.micro_batches[index])
                    gradients.collect()
            self._checks_gradients = False
            for hook in self.hooks:
                hook.after_passes(step)
            buffers.finish(step_batch)
            if due := gradients.reduce(step):  # this step, or an earlier one whose sum is applied only now
                self.before_optimizer_step(due)
        except Exception as error:
            for hook in self.hooks:
                hook.on_error(step, error)
            advised = out_of_memory_advice(error, step.number, step.data.layout, step.strategy.less_memory)
            if advised and isinstance(error, RuntimeError | MemoryError):
                raise StepRefused(advised) from error
            raise
        if self.trainer.is_last_batch or self.trainer.global_step + 1 == self.trainer.max_steps:
            self.flush()
            buffers.end_of_epoch()
        return step.means()

    def before_optimizer_step(self, step: "Step") -> None:
        """Call the hooks before an optimizer step with the gradient of `step`."""
        for hook in self.hooks:
            hook.before_optimizer_step(step)

    def after_optimizer_step(self, step: "Step") -> None:
        """Call the hooks after an optimizer step."""
        for hook in self.hooks:
            hook.after_optimizer_step(step)

    def flush(self) -> None:
        """Read results that are still on the GPU, such as the check that all gradients are finite."""
        self.buffers.flush()
        for hook in self.hooks:
            hook.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the state on which later steps depend: of the sums of the gradients and of the buffers.

        Every process calls this.
        """
        self.flush()
        gradients = self.gradients.state_dict()
        return ({"gradients": gradients} if gradients else {}) | self.buffers.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint of any layout."""
        self.gradients.load_state_dict(state.get("gradients", {}))
        self._restored_state = state
        vars(self).pop("buffers", None)  # those of an earlier `fit` have another state


@dataclass(eq=False)
class Step:
    """One optimizer step on this process.

    Attributes:
        passes: the `StepPasses` that runs it.
        batch: this process's part of the step.
        outputs: the numbers that `training_step` returned for each micro-batch, in the order of their backward passes.
    """

    passes: StepPasses
    batch: StepBatch
    outputs: list[Outputs] = field(default_factory=list)
    # by index: the batch and loss of each micro-batch that has had its forward pass, but not its backward pass
    _pending: dict[int, tuple[Any, Tensor]] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The number of the optimizer step since the run began, 0-based."""
        return self.batch.step

    @property
    def trainer(self) -> Any:
        """The trainer."""
        return self.passes.trainer

    @property
    def strategy(self) -> PieceStrategy:
        """The trainer's strategy."""
        return self.passes.gradients.strategy

    @property
    def module(self) -> Any:
        """The module that is trained."""
        return self.strategy.lightning_module

    @property
    def data(self) -> StepData:
        """The trainer's data module."""
        return data_of(self.trainer)

    @property
    def losses(self) -> list[Tensor]:
        """The losses of the micro-batches, in the order of their backward passes, without their graphs."""
        return [outputs["loss"] for outputs in self.outputs]

    def forward(self, index: int) -> None:
        """Run the forward pass of micro-batch `index`. Keep its graph until `backward`."""
        micro_batch, strategy = self.batch.micro_batches[index], self.strategy
        batch = self.prepared(micro_batch)
        loss, outputs = self._training_step(batch, micro_batch)
        self._pending[index] = batch, loss
        if strategy.has_last_stage:
            self.outputs.append(outputs)

    def backward(self, index: int) -> None:
        """Run the backward pass of micro-batch `index`, with its loss weighted by its samples."""
        micro_batch, strategy = self.batch.micro_batches[index], self.strategy
        batch, loss = self._pending.pop(index)
        if not strategy.has_last_stage:
            with torch.no_grad():
                self.outputs.append(self._training_step(batch, micro_batch)[1])
        self._differentiate(loss, micro_batch)

    def compute(self, micro_batch: MicroBatch) -> None:
        """Run both passes of a piece of this step once more, whichever process computes it in the step.

        Its loss and the other numbers of `training_step` are not recorded.
        """
        loss, _ = self._training_step(self.prepared(micro_batch), micro_batch)
        self._differentiate(loss, micro_batch)

    def trial_loss(self, batch: Any, micro_batch: MicroBatch, piece: int | None = None, graph: bool = False) -> Tensor:
        """Return the loss of a prepared batch of a micro-batch. It is not recorded.

        Args:
            batch: the batch; it may have another size than the micro-batch.
            micro_batch: its device computes the batch.
            piece: the random numbers are those of the piece with this number; None: of the micro-batch's.
            graph: whether the loss has its graph.
        """
        if piece is not None:
            micro_batch = replace(micro_batch, piece=piece)
        loss, outputs = self._training_step(batch, micro_batch)
        return loss if graph else outputs["loss"]

    def means(self) -> Outputs:
        """Return the numbers of `training_step`, each the mean over this process's samples.

        A number that some micro-batch lacks is left out.
        """
        if not self.outputs:  # a rank without samples needs a loss, because all ranks may log it
            dtype = next(self.module.parameters()).dtype
            return {"loss": torch.zeros((), dtype=dtype, device=self.strategy.root_device)}
        if len(self.outputs) == 1:
            return self.outputs[0]
        sizes = [micro_batch.size for micro_batch in self.batch.micro_batches]
        samples = sum(sizes)
        return {
            name: torch.stack([each[name] * (n / samples) for each, n in zip(self.outputs, sizes, strict=True)]).sum()
            for name in self.outputs[0]
            if all(name in each for each in self.outputs)
        }

    def _training_step(self, batch: Any, micro_batch: MicroBatch) -> tuple[Tensor, Outputs]:
        """Run `training_step` on a prepared batch, with the piece's seed. Return the loss and all numbers."""
        seed = training_step_seed(self.passes.seed, self.batch.step, micro_batch.piece)
        with self.strategy.micro_batch(micro_batch, seed):
            return outputs_of(self.passes.forward(batch))

    def _differentiate(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        """Weight a micro-batch's loss and run its backward pass."""
        weight = 1.0
        if self.strategy.has_last_stage:  # an earlier stage receives a gradient that is weighted already
            weight = self.passes.gradients.weight(micro_batch, self.batch)
        self.passes.backward(loss if weight == 1 else loss * weight)

    def prepared(self, micro_batch: MicroBatch) -> Any:
        """Return the batch for `training_step`: after mixup or cutmix, and the module's `on_after_batch_transfer`."""
        data, module = self.data, self.module
        batch = data.prepare(micro_batch)
        changes = [data.mix] if data.mixes else []
        if overrides_method(module, "on_after_batch_transfer", pl.LightningModule):
            changes.append(partial(module.on_after_batch_transfer, dataloader_idx=0))
        if not changes:
            return batch
        seed = preparation_seed(self.passes.seed, self.batch.step, micro_batch.piece)
        seed_device(seed, self.strategy.root_device)
        for change in changes:
            batch = change(batch)
        return batch


def overrides_method(owner: Any, name: str, base: type) -> bool:
    """Check whether `owner`, or its class, overrides the method `name` of `base`."""
    return getattr(getattr(owner, name), "__func__", None) is not getattr(base, name)


def outputs_of(output: Any) -> tuple[Tensor, Outputs]:
    """Split the result of `training_step` into its loss, which keeps its graph, and its numbers, which do not.

    Args:
        output: a loss, or a dict with `loss` and other numbers.

    Returns:
        The loss, and the numbers by name, the loss among them.

    Raises:
        StepRefused: there is no loss, or it is not one number.
    """
    values = output if isinstance(output, Mapping) else {"loss": output}
    loss = values.get("loss")
    if not isinstance(loss, Tensor):
        returned = "a dict without a tensor 'loss'" if values is output else type(output).__name__
        remedy = "it must return the loss of every batch, or a dict with it under 'loss'"
        raise StepRefused(f"training_step returned {returned}: {remedy}")
    if loss.numel() != 1:
        raise StepRefused(f"training_step returned a loss of shape {list(loss.shape)}: it must be one number, the mean")
    numbers = {"loss": loss.detach()}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            numbers[name] = value.detach()
        elif isinstance(value, int | float):
            numbers[name] = torch.full((), float(value), device=loss.device)
    return loss, {name: number.reshape(()) if number.ndim else number for name, number in numbers.items()}
