"""BatchNorm's running statistics of a step: the mean over its pieces, each started from the step's beginning.

Left alone, a layer would apply its momentum once per piece on one device and once per step on many, and ranks would
drift apart. The mean over the pieces is the same on every layout, and for one piece it is what torch does.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lockstep.arithmetic.exact_sum import ExactSum, reduce_alone
from lockstep.step.gradients import GradientSum, all_reduce
from lockstep.step.network_parts import segment_ids


def statistics(module: nn.Module) -> dict[str, Any]:
    """A module's normalisation layers with running statistics, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(getattr(layer, "running_mean", None), Tensor)
        and hasattr(layer, "num_batches_tracked")  # FrozenBatchNorm2d counts nothing
    }


class BatchNormStats:
    """Keeps the running statistics of all normalisation layers of a module in step.

    Args:
        gradients: how those of the pieces are summed: where they are exact, the mean does not depend on the order of
            the pieces either.
        exponents: the grids of the exact sums before, of a run that goes on.
    """

    def __init__(self, gradients: GradientSum, exponents: Sequence[int | None]) -> None:
        self.strategy, self.world_size = gradients.strategy, gradients.world_size
        module = self.strategy.lightning_module
        layers, kinds = statistics(module), ("running_mean", "running_var")
        self.layers: list[Any] = list(layers.values())
        self.names = [f"{name}.{kind}" if name else kind for name in layers for kind in kinds]
        self.buffers = [getattr(layer, kind) for layer in layers.values() for kind in kinds]
        self.counters: list[Tensor] = [layer.num_batches_tracked for layer in self.layers]
        self.active = False
        self.start: list[Tensor] = []  # the buffers where the step begins, and the counters
        self.start_counts: list[Tensor] = []
        self.total: list[Tensor] = []
        self.counts: list[Tensor] = []  # after the step
        # statistics are of the order of one, and start at exactly zero: a grid below 2**-45 would serve nobody
        self.exact: ExactSum | None = None
        if gradients.exact:
            owners = [layer for layer in self.layers for _ in kinds]
            summed_here, names = (
                [self.strategy.holds(layer) for layer in owners],
                self.names if gradients.options.check_messages else (),
            )
            self.exact = ExactSum(self.buffers, 0, segment_ids(module, owners), summed_here, names)
            self.exact.exponents = list(exponents) or self.exact.exponents

    def begin(self, step_batch: Any) -> None:
        """Remembers where the step starts. One piece on one process needs none of this."""
        one = step_batch.num_nonempty == 1 and self.world_size == 1
        self.active = bool(self.buffers) and not one
        if self.active:
            self.start = [buffer.clone() for buffer in self.buffers]
            self.start_counts = [counter.clone() for counter in self.counters]
            self.counts = [now + layer.training for now, layer in zip(self.counters, self.layers, strict=True)]
            if self.exact is not None:
                self.exact.begin(step_batch.step)
            else:
                self.total = [torch.zeros_like(buffer, dtype=_wide(buffer)) for buffer in self.buffers]

    def before(self) -> None:
        """Puts the step's beginning back before a micro-batch."""
        if self.active:
            # backward passes may be still to come; autograd keeps these for them, and need not know
            torch._foreach_copy_([buffer.data for buffer in self.buffers], self.start)
            torch._foreach_copy_(self.counters, self.start_counts)  # `momentum=None` weighs a piece by them

    def after(self) -> None:
        """Add what a micro-batch left."""
        if self.active and self.exact is not None:
            self.exact.add(self.buffers)
        elif self.active:
            torch._foreach_add_(self.total, [buffer.to(_wide(buffer)) for buffer in self.buffers])

    def finish(self, step_batch: Any) -> None:
        """The mean over the step's pieces, on every process."""
        if not self.active:
            return
        if self.exact is not None:
            self.total = self.exact.total(all_reduce if self.world_size > 1 else reduce_alone, step_batch.num_nonempty)
        else:
            if self.world_size > 1:
                dist.all_reduce(flat := parameters_to_vector(self.total))
                vector_to_parameters(flat, self.total)
            torch._foreach_div_(self.total, step_batch.num_nonempty)
        for at, layer in enumerate(self.layers):
            if not layer.training:  # frozen by `eval()`: the mean of equal numbers would round
                self.total[2 * at : 2 * at + 2] = self.start[2 * at : 2 * at + 2]
        torch._foreach_copy_(self.buffers, self.total)
        torch._foreach_copy_(self.counters, self.counts)


def _wide(buffer: Tensor) -> torch.dtype:
    """What statistics are summed in: half precision would round at each piece."""
    return torch.promote_types(buffer.dtype, torch.float32)
