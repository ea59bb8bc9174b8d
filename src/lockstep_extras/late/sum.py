"""Apply the sums of gradients some steps late."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from lockstep.checkpoint.callback import Checkpoint
from lockstep.errors import UserError
from lockstep.lightning.epochs import is_last_step
from lockstep.step.batch import StepBatch
from lockstep.step.gradients import Gradients, GradientSum, StartedSum
from lockstep.step.passes import StepPasses
from lockstep.step.step import Step
from lockstep.step.strategy import proxy
from lockstep.text import plural


class LateSum(GradientSum):
    """Methods for `proxy`: a gradient sum of which several, of following steps, run at the same time.

    Attributes:
        steps: how many steps later a sum is applied.
        queue: the sums that are started but not applied yet, with their steps; the oldest first.
        sums: exact sums, one for each step whose sum may run at the same time.
    """

    steps: int
    queue: deque[tuple[StartedSum, Step]]
    sums: list[Any]
    sum: Any = None
    trained: Any = None

    def begin(self, step_batch: StepBatch) -> None:
        at, trained = step_batch.step % len(self.sums), list(self.trained or ())
        if self.exact:
            self.sum = self.sums[at]
        super().begin(step_batch)
        if list(self.trained or ()) != trained:  # the others are sums of other parameters
            self.sums = [None] * len(self.sums)
        self.sums[at] = self.sum
        self.strategy.use_reducer(False)  # it would end the sum in the last backward pass

    def start(self, step_batch: StepBatch) -> StartedSum:
        exact_sum, started = self.sum, super().start(step_batch)
        # A group's first grid follows from the result of its first sum. The next sum may begin before this one is
        # applied, so wait for the result here.
        if exact_sum is not None and None in exact_sum.grid_exponents:
            exact_sum.update_grids(started.result[1])
        return started

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sum, and the sums that are not applied yet."""
        names = {id(p): name for name, p in self.strategy.lightning_module.named_parameters()}
        waiting = []
        for started, step in self.queue:
            gradients, maxima = started.result
            named = {names[id(p)]: g for p, g in zip(started.parameters, gradients, strict=True) if g is not None}
            waiting.append({"step": step.number, "gradients": named, "bounds": maxima})
        return {**super().state_dict(), "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        waiting = state.get("waiting", [])
        if len(waiting) > self.steps:
            raise UserError(
                f"extras.late.steps={self.steps}: the checkpoint holds {plural(len(waiting), 'late gradient')}: "
                f"use extras.late.steps={len(waiting)} or more"
            )
        super().load_state_dict({name: value for name, value in state.items() if name != "waiting"})
        self.sums = [None] * len(self.sums)
        self.queue = deque(map(self._restored, waiting))

    def _restored(self, saved: Mapping[str, Any]) -> tuple[StartedSum, Step]:
        module = self.strategy.lightning_module
        parameters = dict(module.named_parameters())
        values = {parameters[name]: gradient for name, gradient in saved["gradients"].items()}
        gradients: Gradients = [torch.empty_like(p).copy_(gradient) for p, gradient in values.items()]
        batch = StepBatch([], samples=0, num_nonempty=0, epoch=0, step=saved["step"], all_ranks_have_data=True)
        step = module.trainer.fit_loop.epoch_loop.passes.new_step(batch)
        return StartedSum(list(values), lambda: (gradients, saved["bounds"])), step


class LatePasses(StepPasses):
    """Methods for `proxy`: the passes of a step, after which the gradient of an earlier step is applied."""

    gradients: LateSum

    def reduce(self, step: Step) -> None:
        queue = self.gradients.queue
        if len(queue) == self.gradients.steps:
            # Wait for the sum that is applied next, so that later sums have the network for themselves.
            _ = queue[0][0].result
        # Hooks see this step later. They need its sample ids and outputs, but its batches would take memory.
        micro_batches = [replace(each, batch=None, augmentation_numbers=None) for each in step.batch.micro_batches]
        without_data = self.new_step(replace(step.batch, micro_batches=micro_batches))
        without_data.buffers, without_data.outputs = step.buffers, step.outputs
        queue.append((self.gradients.start(step.batch), without_data))
        if len(queue) > self.gradients.steps:
            self.apply_next()

    def apply_next(self) -> None:
        """Put the oldest sum into the parameters' `.grad`, and call the hooks before the optimizer step."""
        started, step = self.gradients.queue.popleft()
        self.gradients.apply(started)
        self.before_optimizer_step(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, if all gradients that wait are finite: else the hooks before the optimizer step refuse."""
        for started, step in self.gradients.queue:
            if not all(bool(gradient.isfinite().all()) for gradient in started.result[0] if gradient is not None):
                self.gradients.apply(started)
                self.before_optimizer_step(step)
                self.flush()
        return super().state_dict()


def late_sum(gradients: GradientSum, steps: int) -> LateSum:
    """Return a gradient sum whose sums are applied `steps` steps late."""
    late: LateSum = proxy(gradients, LateSum)
    late.steps, late.queue, late.sums = steps, deque(), [None] * (steps + 1)
    return late


class ApplyRemaining(Callback):
    """Applies the remaining gradients: after the last step, or at the end of a run that stops early, and then saves.

    It must run before other callbacks, since an average of the weights replaces the weights at the end.
    """

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if is_last_step(trainer):
            apply_remaining(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if apply_remaining(trainer):
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, Checkpoint):
                    callback.save(trainer)

    on_fit_end = on_train_end


def apply_remaining(trainer: Any) -> int:
    """Apply the remaining gradients, the oldest first, without counting steps. Return their number."""
    loop = trainer.fit_loop.epoch_loop
    passes: LatePasses = loop.passes
    count = len(passes.gradients.queue)

    def closure() -> Tensor:
        passes.apply_next()
        return torch.zeros(())

    while passes.gradients.queue:
        loop.run_optimizer(closure)
    passes.flush()
    return count
