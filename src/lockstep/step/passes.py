"""The order of one optimizer step: its passes, the sum of its gradient, and the hooks at fixed places between them."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.arithmetic.layout import Action
from lockstep.errors import StepRefused
from lockstep.launch.process_group import gather_objects
from lockstep.step.batch import MicroBatch, StepBatch, data_of
from lockstep.step.buffers import StepBuffers
from lockstep.step.gradients import GradientSum
from lockstep.step.hook import StepHook
from lockstep.step.memory import out_of_memory_advice
from lockstep.step.outputs import Outputs, StepOutputs
from lockstep.step.parameters import (
    check_parameters,
    gradient_versions,
    refuse_other_gradients,
    refuse_sparse_gradients,
)
from lockstep.step.step import Step


class StepPasses:
    """Compute the gradient of a step from its micro-batches; a micro-batch is one piece on this process.

    An extra may put a subclass in its place, see `Extra.wrap_passes`.

    Args:
        trainer: the trainer.
        gradients: sums the gradients of a step's pieces.
        hooks: the hooks of each step.
        seed: the run's seed. The random numbers inside a piece depend on it, the step and the piece.
        forward_pass: see `Step`.
        backward_pass: see `Step`.
    """

    def __init__(
        self,
        trainer: Any,
        gradients: GradientSum,
        hooks: Sequence[StepHook],
        seed: int,
        forward_pass: Callable[[Any, MicroBatch], Any],
        backward_pass: Callable[[Tensor, MicroBatch], None],
    ) -> None:
        self.trainer = trainer
        self.gradients = gradients
        self.hooks = hooks
        self.seed = seed
        self._passes = forward_pass, backward_pass
        self._restored_state: dict[str, Any] = {}  # the state from a checkpoint
        self._weighted: bool | None = None  # whether `training_step` returns a weight; None before the first step
        self.last_outputs: StepOutputs | None = None  # those of the last step with a sample of this process
        self._checks_gradients = True  # in the next step

    @cached_property
    def buffers(self) -> StepBuffers:
        """The module's buffers; made at first use, when the module is on its device."""
        return StepBuffers(self.gradients, self._restored_state)

    @cached_property
    def leaves_ranks_empty(self) -> bool:
        """Whether a short last step of an epoch has fewer samples than pieces, so that a process may have none."""
        order = data_of(self.trainer).order
        tail = order.samples_per_epoch % order.layout.batch_size
        return self.gradients.replicas > 1 and 0 < tail < order.layout.pieces

    def begin_epoch(self) -> None:
        """Check the parameters, and the gradients of the epoch's first step.

        Raises:
            UserError: see `check_parameters`.
        """
        pieces = data_of(self.trainer).layout.pieces
        strategy = self.gradients.strategy
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        optimized = [p for group in groups for p in group["params"]] if strategy.weights == "whole" else []
        check_parameters(strategy.lightning_module, optimized, self.gradients.exact, pieces)
        self._checks_gradients = True

    def new_step(self, step_batch: StepBatch) -> Step:
        """Return a step of which this process computes `step_batch`."""
        return Step(step_batch, self.trainer, self.gradients, self.seed, *self._passes)

    def run(self, step: Step) -> Outputs:
        """Compute the gradient of the mean loss over the whole step's samples, in the parameters' `.grad`.

        Returns:
            `loss` and the other numbers that `training_step` returned, each the mean over this process's samples, on
            its device. The loss of a process without a sample is 0.

        Raises:
            StepRefused: a pass ran out of memory, or `training_step` returned no loss.
        """
        step.buffers = self.buffers
        step.forget()
        try:
            for hook in self.hooks:
                hook.before_step(step)
            self.buffers.begin(step.batch, self._ends_epoch())
            self.gradients.begin(step.batch)
            self.compute(step)
            self._sum_weights(step)
            self.buffers.finish(step.batch)
            self.reduce(step)
        except Exception as error:
            for hook in self.hooks:
                hook.on_error(step, error)
            advised = out_of_memory_advice(error, step.number, step.data.layout, step.strategy.less_memory)
            if advised and isinstance(error, RuntimeError | MemoryError):
                raise StepRefused(advised) from error
            raise
        if self._ends_epoch():
            self.flush()
        step.batch.returned = step.outputs
        return step.means()

    def compute(self, step: Step) -> None:
        """Run the passes of this process's micro-batches, and collect the gradient of each."""
        for action, index in step.strategy.schedule(step.batch.micro_batches):
            if action is Action.FORWARD:
                self.forward(step, index)
            else:
                self.backward(step, index)
                self.gradients.collect()
        self._checks_gradients = False

    def forward(self, step: Step, index: int) -> None:
        """Run the forward pass of a micro-batch, from the buffers that the step began with."""
        checks = self._checks_gradients and not index
        self.buffers.before_forward()
        before = gradient_versions(step.module) if checks else {}
        step.forward(index)
        self.buffers.after_forward(step.batch.micro_batches[index].piece)
        if checks:
            refuse_other_gradients(before, step.module)

    def backward(self, step: Step, index: int) -> None:
        """Run the backward pass of a micro-batch: the parameters have its gradient, added to those not collected."""
        self.buffers.before_backward()
        step.backward(index)
        self.buffers.after_backward()
        if self._checks_gradients:
            gradients = self.gradients
            if gradients.exact or gradients.replicas > 1:
                setting = "exact=true" if gradients.exact else f"strategy={step.strategy.name}"
                refuse_sparse_gradients(setting, step.module)

    def reduce(self, step: Step) -> None:
        """Sum the gradient over all processes, and call the hooks before the optimizer step."""
        self.gradients.reduce(step.batch)
        self.before_optimizer_step(step)

    def _ends_epoch(self) -> bool:
        """Return whether this step is the last one of an epoch or of the run."""
        return bool(self.trainer.is_last_batch) or self.trainer.global_step + 1 == self.trainer.max_steps

    def _sum_weights(self, step: Step) -> None:
        """Sum the weights that `training_step` has returned over the step's pieces, in their order, on every process.

        Raises:
            StepRefused: only some calls have returned one.
        """
        returned = ["weight" in outputs for outputs in step.outputs]
        if self._weighted is None:  # ask once, since a process may have no sample
            self._weighted = any(gather_objects(any(returned)))
        if any(each != self._weighted for each in returned):
            raise StepRefused("training_step returns a weight beside some losses only: return one beside each")
        if not self._weighted:
            return
        weights = [0.0] * step.data.layout.pieces
        for micro_batch, outputs in zip(step.batch.micro_batches, step.outputs, strict=True):
            weights[micro_batch.piece] = float(outputs["weight"]) * micro_batch.size
        if self.gradients.replicas > 1:
            of_all = torch.tensor(weights, dtype=torch.float64, device=step.strategy.root_device)
            dist.all_reduce(of_all)  # one number and zeros for each piece, so their sum is not rounded
            weights = of_all.tolist()
        step.batch.weight = math.fsum(weights)

    def before_optimizer_step(self, step: Step) -> None:
        """Call the hooks before an optimizer step with the gradient of `step`."""
        for hook in self.hooks:
            hook.before_optimizer_step(step)

    def returned(self, step: Step, numbers: Outputs) -> StepOutputs:
        """Return what `on_train_batch_end` gets of the results of `training_step`; `numbers` is what `run` returned."""
        micro_batches, others = step.batch.micro_batches, step.others
        order = sorted(range(len(others)), key=lambda at: micro_batches[at].piece)  # dp computes them in rounds
        sizes = [micro_batches[at].size for at in order]
        outputs = StepOutputs(numbers, [others[at] for at in order], sizes)
        if others and self.leaves_ranks_empty:
            self.last_outputs = outputs
        elif not others:
            outputs.before = self.last_outputs
        return outputs

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
