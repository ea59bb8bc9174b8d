"""The gradient of a step: the sum over its pieces, on this process and over all.

The result is the gradient of the mean loss over the step's samples, also when its tail is short or pieces differ in
size: each micro-batch's mean loss is weighted by its samples over the step's samples.

With `late` it is applied so many steps later, and its sum over processes runs meanwhile. That is the staleness of
asynchronous SGD (Dean et al., Large scale distributed deep networks, 2012), but a fixed one: which gradient meets which
weights follows from the step alone, so a run is repeatable, and the same on every layout.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.arithmetic.exact_sum import ExactSum, alone
from lockstep.step.audit import Audit, trained
from lockstep.step.stages import runs

Result = tuple[list[Tensor | None], list[float]]  # gradients, and under exact what the next grids follow
Step = tuple[Any, list[Tensor]]  # its batch, and the losses of its micro-batches on this process


@dataclass(eq=False)
class StartedSum:
    """A step's gradient, whose sum over all processes may be under way: for each of the `parameters`, None where no
    process has one. All processes wait in the same order."""

    parameters: list[torch.nn.Parameter]
    wait: Callable[[], Result]
    step: Step = (None, [])  # of which it is, without the data

    @cached_property
    def result(self) -> Result:
        return self.wait()

    def give(self) -> Step:
        """Gives the parameters their gradients."""
        for parameter, gradient in zip(self.parameters, self.result[0], strict=True):
            parameter.grad = gradient
        return self.step


class GradientSum:
    """Sums in whatever order the layout computes: autograd accumulates, DDP averages in the step's last backward pass.

    Args:
        strategy: the trainer's strategy; only inside `strategy.sync(...)` does DDP sum.
        world_size: worker processes over all nodes.
        late: steps between the passes of a gradient and its use.
        own: each process keeps its gradient, that of its own samples, and nothing is summed over processes.
        audit: compares pieces that are computed twice. With it exact sums look whether messages came as they were sent.

    Attributes:
        line: the sums that are started and not used yet, the oldest first.
    """

    def __init__(
        self, strategy: Any, world_size: int, late: int = 0, own: bool = False, audit: Audit | None = None
    ) -> None:
        self.strategy = strategy
        self.world_size = world_size
        self.late = late
        self.own = own
        self.audit = audit
        self.checked = audit is not None and world_size > 1
        self.ddp_sums = False  # whether DDP's reducer sends this step's gradients
        self.line: deque[StartedSum] = deque()

    def begin(self, step_batch: Any) -> None:
        """Before the first micro-batch. DDP waits for every process, so each must have a sample; and where what is
        trained has changed since DDP was told, it would leave that out."""
        by_ddp = self.world_size > 1 and not self.late and not self.own
        self.ddp_sums = by_ddp and step_batch.all_ranks_have_data and not self.strategy.outdated

    def weight(self, micro_batch: Any, step_batch: Any) -> float:
        """What a micro-batch's mean loss counts for. DDP divides by the world size, so that is multiplied in."""
        if self.own:
            return float(sum(micro_batch.sizes) / step_batch.num_local_samples)
        return sum(micro_batch.sizes) / step_batch.samples * self.world_size

    def micro_batch(self, number: int, step_batch: Any) -> AbstractContextManager[Any]:
        """The context of a micro-batch's forward and backward pass: only the last one may send gradients. On one
        process none: its reducer, too, would wait for all parameters."""
        last = number == len(step_batch.micro_batches) - 1
        return self.strategy.sync(first=number == 0) if self.ddp_sums and last else nullcontext()

    def collect(self) -> None:
        """After a micro-batch's backward pass."""

    def wait(self) -> None:
        """After the last micro-batch: waits for the gradient that is due, so that other sums have the link."""
        if self.line and len(self.line) == self.late:
            _ = self.line[0].result

    def finish(self, step_batch: Any, losses: list[Tensor]) -> Step | None:
        """Then: where DDP had no part in it, all processes sum. What no gradient has reached on any of them keeps none,
        as on one device: an optimizer leaves it alone, and would decay a weight whose gradient is 0.

        Returns:
            The step of which the parameters have the gradient now; None: none is due.
        """
        if self.ddp_sums or (not self.late and (self.world_size == 1 or self.own)):
            return step_batch, losses
        return self._finish(step_batch, losses)

    def _finish(self, step_batch: Any, losses: list[Tensor]) -> Step | None:
        started = self.start(step_batch)
        kept = [replace(each, batch=None, draws=None) for each in step_batch.micro_batches]
        started.step = replace(step_batch, micro_batches=kept), losses
        self.line.append(started)
        return self.give() if len(self.line) > self.late else None

    def give(self) -> Step:
        """Gives the parameters the oldest gradient that is under way."""
        return self.line.popleft().give()

    def start(self, step_batch: Any) -> StartedSum:
        """Takes what the passes have left in the parameters, and starts its sum over all processes, which all call."""
        parameters = trained(self.strategy.lightning_module)
        own = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        if self.world_size == 1:
            return StartedSum(parameters, lambda: (own, []))
        gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, own, strict=True)]
        reached = gradients[0].new_tensor([gradient is not None for gradient in own])
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), reached])
        work = dist.all_reduce(flat, async_op=True)

        def wait() -> Result:
            work.wait()
            *parts, reached = flat.split([*(p.numel() for p in parameters), len(parameters)])
            found: list[Tensor | None] = []
            for parameter, part, ranks in zip(parameters, parts, reached.tolist(), strict=True):
                part /= self.world_size
                found.append(torch.empty_like(parameter).copy_(part.view(parameter.shape)) if ranks else None)
            return found, []

        return StartedSum(parameters, wait)


class ExactGradientSum(GradientSum):
    """Sums without regard to order, so that every layout gets the same bits (see `lockstep.arithmetic.exact_sum`).

    Each piece's gradient is taken by itself and never sent: after the last micro-batch, one all-reduce of integers. A
    micro-batch's mean loss is weighted by its samples, which cancels the mean's division exactly, and the division by
    the step's samples comes last; so it does not matter whether it holds one piece or, under dp, several.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sums: list[ExactSum] = []  # one for each step that may be under way
        self.sum: Any = None  # the present step's
        self.everything: list[torch.nn.Parameter] = []
        self.parameters: list[torch.nn.Parameter] = []  # those that are trained
        self.exponents: list[int | None] = []  # the grids, which follow from the steps before: checkpoints hold them

    def begin(self, step_batch: Any) -> None:
        if not self.everything:
            self.everything = list(self.strategy.lightning_module.parameters())
        trained = [p for p in self.everything if p.requires_grad]
        if not self.sums or [id(p) for p in trained] != [id(p) for p in self.parameters]:  # unfrozen, say
            borders, mine = runs(self.strategy.lightning_module, trained), [self.strategy.holds(p) for p in trained]
            self.parameters = trained
            named = {id(p): name for name, p in self.strategy.lightning_module.named_parameters()}
            like, names = [p.detach() for p in trained], [named[id(p)] for p in trained] if self.checked else ()
            self.sums = [ExactSum(like, None, borders, mine, names) for _ in range(self.late + 1)]
            if len(self.exponents) != len(self.sums[0].exponents):
                self.exponents = self.sums[0].exponents
            for each in self.sums:
                each.exponents = self.exponents
        self.sum = self.sums[step_batch.step % len(self.sums)]
        self.sum.begin(step_batch.step)
        self._forget()

    def _forget(self) -> None:
        for parameter in self.parameters:  # also what no optimizer steps, nor resets
            parameter.grad = None

    def weight(self, micro_batch: Any, step_batch: Any) -> float:
        return float(sum(micro_batch.sizes))

    def collect(self) -> None:
        for gradients in self.strategy.piece_gradients(self.parameters):
            self.sum.add([p.grad if g is None else g for p, g in zip(self.parameters, gradients, strict=True)])
        self._forget()

    def finish(self, step_batch: Any, losses: list[Tensor]) -> Step | None:
        return self._finish(step_batch, losses)

    def start(self, step_batch: Any) -> StartedSum:
        total, units = self.sum, self.sum.send()
        work = dist.all_reduce(units, async_op=True) if self.world_size > 1 else None

        def wait() -> Result:
            if work is not None:
                work.wait()
            sums, bounds = total.receive(all_reduce if self.world_size > 1 else alone, step_batch.samples)
            return [g if reached else None for g, reached in zip(sums, total.given, strict=True)], bounds

        started = StartedSum(self.parameters, wait)
        if self.late and None in total.grids:  # of a run's first step; those until it is given need a grid too
            total.follow(started.result[1])
        return started

    def give(self) -> Step:
        bounds = self.line[0].result[1]
        if self.sum is not None and len(bounds) == len(self.sum.own):  # else others are trained by now
            self.sum.follow(bounds)
        return super().give()


def all_reduce(tensor: Tensor, op: str) -> None:
    """`lockstep.arithmetic.exact_sum.AllReduce` over the default process group."""
    dist.all_reduce(tensor, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
