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
from lockstep.step.batch import MicroBatch, StepBatch
from lockstep.step.gradients import Gradients, GradientSum, StartedSum
from lockstep.step.passes import Step, StepHook
from lockstep.text import plural


class LateSum(GradientSum):
    """Applies the sums of another gradient sum, `inner`, `steps` steps later.

    Attributes:
        queue: the sums that are started but not applied yet, with their steps; the oldest first.
    """

    def __init__(self, inner: GradientSum, steps: int) -> None:
        super().__init__(inner.strategy, inner.world_size, inner.check_messages)
        self.inner = inner
        self.exact = inner.exact
        inner.sums_at_once = steps + 1
        self.steps = steps
        self.queue: deque[tuple[StartedSum, Step]] = deque()

    def begin(self, step_batch: StepBatch) -> None:
        self.inner.begin(step_batch)
        self.strategy.use_reducer(False)  # it would end the sum in the last backward pass

    def weight(self, micro_batch: MicroBatch, step_batch: StepBatch) -> float:
        return self.inner.weight(micro_batch, step_batch)

    def collect(self) -> None:
        self.inner.collect()

    def reduce(self, step: Step) -> Step | None:
        if len(self.queue) == self.steps:
            # Wait for the sum that is applied next, so that later sums have the network for themselves.
            _ = self.queue[0][0].result
        # Hooks see this step later. They need its sample ids and outputs, but its batches would take memory.
        micro_batches = [replace(each, batch=None, augmentation_numbers=None) for each in step.batch.micro_batches]
        without_data = Step(step.passes, replace(step.batch, micro_batches=micro_batches), step.outputs)
        self.queue.append((self.inner.start(step.batch), without_data))
        return self.apply_next() if len(self.queue) > self.steps else None

    def apply_next(self) -> Step:
        """Put the oldest sum into the parameters' `.grad`. Return its step."""
        started, step = self.queue.popleft()
        self.inner.apply(started)
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return the inner sum's state and the sums that are not applied yet."""
        return {**self.inner.state_dict(), "waiting": [self._saved(*each) for each in self.queue]}

    def _saved(self, started: StartedSum, step: Step) -> dict[str, Any]:
        gradients, maxima = started.result
        if not all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None):
            self.inner.apply(started)
            step.passes.before_optimizer_step(step)
            step.passes.flush()
        names = {id(p): name for name, p in step.module.named_parameters()}
        named = {names[id(p)]: g for p, g in zip(started.parameters, gradients, strict=True) if g is not None}
        return {"step": step.number, "gradients": named, "bounds": maxima}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rest = {name: value for name, value in state.items() if name != "waiting"}
        waiting = state.get("waiting", [])
        if len(waiting) > self.steps:
            raise UserError(
                f"extras.late.steps={self.steps}: the checkpoint holds {plural(len(waiting), 'late gradient')}: "
                f"use extras.late.steps={len(waiting)} or more"
            )
        self.inner.load_state_dict(rest)
        self.queue = deque(map(self._restored, waiting))

    def _restored(self, saved: Mapping[str, Any]) -> tuple[StartedSum, Step]:
        module = self.strategy.lightning_module
        parameters = dict(module.named_parameters())
        values = {parameters[name]: gradient for name, gradient in saved["gradients"].items()}
        gradients: Gradients = [torch.empty_like(p).copy_(gradient) for p, gradient in values.items()]
        batch = StepBatch([], samples=0, num_nonempty=0, epoch=0, step=saved["step"], all_ranks_have_data=True)
        step = Step(module.trainer.fit_loop.epoch_loop.passes, batch)
        return StartedSum(list(values), lambda: (gradients, saved["bounds"])), step


class LateSteps(StepHook):
    """Applies the remaining gradients after the last step."""

    def __init__(self, late: LateSum) -> None:
        self.late = late

    def after_optimizer_step(self, step: Step) -> None:
        if is_last_step(step.trainer):
            apply_remaining(step.trainer, self.late)


class ApplyRemaining(Callback):
    """Applies the remaining gradients and saves, at the end of a run that stops early or has no step left.

    It must run before other callbacks, since an average of the weights replaces the weights at the end.
    """

    def __init__(self, late: LateSum) -> None:
        self.late = late

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if apply_remaining(trainer, self.late):
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, Checkpoint):
                    callback.save(trainer)

    on_fit_end = on_train_end


def apply_remaining(trainer: Any, late: LateSum) -> int:
    """Apply the remaining gradients, the oldest first, without counting steps. Return their number."""
    loop, count = trainer.fit_loop.epoch_loop, len(late.queue)

    def closure() -> Tensor:
        loop.passes.before_optimizer_step(late.apply_next())
        return torch.zeros(())

    while late.queue:
        loop.run_optimizer(closure)
    loop.passes.flush()
    return count
