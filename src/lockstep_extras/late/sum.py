"""Apply the sums of gradients some steps late."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor

from lockstep.arithmetic.exact_sum import reduce_alone
from lockstep.checkpoint.callback import Checkpoint
from lockstep.errors import UserError
from lockstep.lightning.epochs import is_last_step
from lockstep.step.batch import StepBatch
from lockstep.step.gradients import GradientSum, all_reduce, flattened, trained_parameters, unflattened
from lockstep.step.passes import StepPasses
from lockstep.step.step import Step
from lockstep.step.strategy import proxy
from lockstep.text import plural

Gradients = list[Tensor | None]  # one for each trained parameter; None: the parameter has no gradient


@dataclass(eq=False)
class StartedSum:
    """A sum over all processes that may still be running.

    Attributes:
        parameters: the parameters that are trained in its step.
        wait: waits for the sum and returns it: the gradients, and with exact=true the largest element of each group of
            tensors that share a grid, from which the next sums' grids are chosen. Use `result`, which calls it once.
    """

    parameters: list[torch.nn.Parameter]
    wait: Callable[[], tuple[Gradients, list[float]]]
    _result: tuple[Gradients, list[float]] | None = None

    @property
    def result(self) -> tuple[Gradients, list[float]]:
        """Wait for the sum. Every process must read the results of its sums in the same order."""
        # no cached_property: that of Python 3.11 has one lock for all objects, and ranks may be threads of a process
        if self._result is None:
            self._result = self.wait()
        return self._result


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
        """Move this process's gradients out of the parameters and start their sum over all processes."""
        if not self.exact:
            return self._start_rounded(step_batch)
        exact_sum, several, divisor = self.sum, self.replicas > 1, self.divisor(step_batch)  # type: ignore[attr-defined]
        units = exact_sum.pack(alone=not several)
        work = dist.all_reduce(units, async_op=True) if several else None

        def wait() -> tuple[Gradients, list[float]]:
            if work is not None:
                work.wait()
            sums, maxima = exact_sum.unpack(all_reduce if several else reduce_alone, divisor)
            return [g if present else None for g, present in zip(sums, exact_sum.present, strict=True)], maxima

        started = StartedSum(list(self.trained.values()), wait)
        # A group's first grid follows from the result of its first sum. The next sum may begin before this one is
        # applied, so wait for the result here.
        if None in exact_sum.grid_exponents:
            exact_sum.update_grids(started.result[1])
        return started

    def _start_rounded(self, step_batch: StepBatch) -> StartedSum:
        """Start a sum up to rounding."""
        parameters = trained_parameters(self.strategy.lightning_module)
        if (scale := self.scale(step_batch)) != 1:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)
        if self.replicas == 1:
            gradients: Gradients = [parameter.grad for parameter in parameters]
            started = StartedSum(parameters, lambda: (gradients, []))
        else:
            flat = flattened(parameters)
            work = dist.all_reduce(flat, async_op=True)

            def wait() -> tuple[Gradients, list[float]]:
                work.wait()
                return unflattened(parameters, flat, self.replicas), []

            started = StartedSum(parameters, wait)
        for parameter in parameters:
            parameter.grad = None
        return started

    def apply(self, started: StartedSum) -> None:
        """Wait for a sum, set the parameters' gradients to it, and choose the grids of later sums."""
        gradients, maxima = started.result
        if self.sum is not None:  # it has other groups if parameters were frozen or unfrozen since the sum was started
            self.sum.update_grids(maxima)
        for parameter, gradient in zip(started.parameters, gradients, strict=True):
            parameter.grad = gradient

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
