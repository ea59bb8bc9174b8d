"""The gradient of a step: the sum over its pieces, on this process and over all.

The result is the gradient of the mean loss over the step's samples, also when its tail is short or pieces differ in
size: each micro-batch's mean loss is weighted by its samples over the step's samples.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.arithmetic.exact import ExactSum, alone
from lockstep.arithmetic.layout import Refusal, listed
from lockstep.step.stages import runs


class GradientSum:
    """Sums in whatever order the layout computes: autograd accumulates, DDP averages in the step's last backward pass.

    Args:
        strategy: the trainer's strategy; `strategy.no_sync()` keeps DDP from averaging.
        world_size: worker processes over all nodes.
    """

    def __init__(self, strategy: Any, world_size: int) -> None:
        self.strategy = strategy
        self.world_size = world_size
        self.ddp_sums = False  # whether DDP's reducer sends this step's gradients

    def begin(self, step_batch: Any) -> None:
        """Before the first micro-batch. DDP waits for every process, so each must have a sample; and where what is
        trained has changed since DDP was told, it would leave that out."""
        self.ddp_sums = self.world_size > 1 and step_batch.all_ranks_have_data and not self.strategy.outdated

    def weight(self, micro_batch: Any, step_batch: Any) -> float:
        """What a micro-batch's mean loss counts for. DDP divides by the world size, so that is multiplied in."""
        return sum(micro_batch.sizes) / step_batch.samples * self.world_size

    def micro_batch(self, number: int, step_batch: Any) -> AbstractContextManager[Any]:
        """The context of a micro-batch's forward and backward pass: only the last one may send gradients. On one
        process none: its reducer, too, would wait for all parameters."""
        if self.ddp_sums and number == len(step_batch.micro_batches) - 1:
            self.strategy.remember(number)
            return nullcontext()
        return self.strategy.no_sync()

    def collect(self) -> None:
        """After a micro-batch's backward pass."""

    def finish(self, step_batch: Any) -> None:
        """After the last micro-batch: where DDP had no part in it, all processes sum. What no gradient has reached on
        any of them keeps none, as on one device: an optimizer leaves it alone, and would decay a weight whose gradient
        is 0."""
        if self.world_size == 1:
            return
        if self.ddp_sums:
            if names := self.strategy.unreached():
                raise Refusal(
                    f"strategy=ddp: no gradient has reached {listed(names)} in a step's last piece, and DDP waits for "
                    "it: use it in every training_step, or freeze it by requires_grad_(False)"
                )
            return
        parameters = [p for p in self.strategy.lightning_module.parameters() if p.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        reached = gradients[0].new_tensor([p.grad is not None for p in parameters])
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), reached])
        dist.all_reduce(flat)
        *parts, reached = flat.split([*(p.numel() for p in parameters), len(parameters)])
        for parameter, part, ranks in zip(parameters, parts, reached.tolist(), strict=True):
            part /= self.world_size
            parameter.grad = torch.empty_like(parameter).copy_(part.view(parameter.shape)) if ranks else None


class ExactGradientSum(GradientSum):
    """Sums without regard to order, so that every layout gets the same bits (see `lockstep.arithmetic.exact`).

    Each piece's gradient is taken by itself and never sent: after the last micro-batch, one all-reduce of integers. A
    micro-batch's mean loss is weighted by its samples, which cancels the mean's division exactly, and the division by
    the step's samples comes last; so it does not matter whether it holds one piece or, under dp, several.
    """

    def __init__(self, strategy: Any, world_size: int) -> None:
        super().__init__(strategy, world_size)
        self.sum: ExactSum | None = None
        self.everything: list[torch.nn.Parameter] = []
        self.parameters: list[torch.nn.Parameter] = []  # those that are trained
        self.exponents: list[int | None] = []  # the grids, which follow from the steps before: checkpoints hold them

    def begin(self, step_batch: Any) -> None:
        if not self.everything:
            self.everything = list(self.strategy.lightning_module.parameters())
        trained = [p for p in self.everything if p.requires_grad]
        if self.sum is None or [id(p) for p in trained] != [id(p) for p in self.parameters]:  # unfrozen, say
            borders, mine = runs(self.strategy.lightning_module, trained), [self.strategy.holds(p) for p in trained]
            self.sum, self.parameters = ExactSum([p.detach() for p in trained], None, borders, mine), trained
            if len(self.exponents) == len(self.sum.exponents):
                self.sum.exponents = self.exponents
            self.exponents = self.sum.exponents
        held = {id(p) for group in self.strategy.optimizers[0].param_groups for p in group["params"]}
        for parameter in self.parameters:
            if id(parameter) not in held:  # what no optimizer steps it does not reset either
                parameter.grad = None
        self.sum.begin()

    def weight(self, micro_batch: Any, step_batch: Any) -> float:
        return float(sum(micro_batch.sizes))

    def micro_batch(self, number: int, step_batch: Any) -> AbstractContextManager[Any]:
        return self.strategy.no_sync()

    def collect(self) -> None:
        assert self.sum is not None
        for gradients in self.strategy.piece_gradients(self.parameters):
            self.sum.add([p.grad if g is None else g for p, g in zip(self.parameters, gradients, strict=True)])
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self, step_batch: Any) -> None:
        assert self.sum is not None
        sums = self.sum.total(all_reduce if self.world_size > 1 else alone, step_batch.samples)
        for parameter, gradient, reached in zip(self.parameters, sums, self.sum.given, strict=True):
            parameter.grad = gradient if reached else None


def all_reduce(tensor: Tensor, op: str) -> None:
    """`lockstep.arithmetic.exact.AllReduce` over the default process group."""
    dist.all_reduce(tensor, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
