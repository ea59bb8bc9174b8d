"""BatchNorm's running statistics of a step: the mean over its pieces, each from the values before the step.

This is the rule for all buffers (`buffers.py`) for layers in which it is known what changes, so nothing is compared.

Without this, a layer would apply its momentum once per piece on one device but once per step on many devices, and the
ranks would drift apart. The mean over the pieces is the same on every layout. For one piece it equals torch's update.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lockstep.arithmetic.exact_sum import ExactSum, reduce_alone
from lockstep.step.batch import StepBatch, data_of
from lockstep.step.gradients import GradientSum, all_reduce
from lockstep.step.network_parts import segment_ids

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # buffers of these layers


def layers_with_statistics(module: nn.Module) -> dict[str, Any]:
    """Return torch's normalisation layers of a module, and layers derived from them, with statistics; by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, BATCH_NORMS + INSTANCE_NORMS)
        and all(isinstance(layer._buffers.get(kind), Tensor) for kind in STATISTICS)
    }


class BatchNormStats:
    """Average the running statistics of a module's normalisation layers over the pieces of each step.

    Args:
        gradients: the gradient sum. If it is exact, the statistics are summed exactly, too.
        exponents: `ExactSum.exponents` of the statistics' sum, from a checkpoint; empty for a new run.
    """

    def __init__(self, gradients: GradientSum, exponents: Sequence[int | None]) -> None:
        module = gradients.strategy.lightning_module
        layout = data_of(module.trainer).layout
        self.replicas = layout.replicas
        layers, kinds = layers_with_statistics(module), STATISTICS[:2]
        self.layers: list[Any] = list(layers.values())
        self.buffers: list[Tensor] = [getattr(layer, kind) for layer in self.layers for kind in kinds]
        # At least float32: half precision would round each sum.
        self.wide = [torch.promote_types(buffer.dtype, torch.float32) for buffer in self.buffers]
        self.counters: list[Tensor] = [layer.num_batches_tracked for layer in self.layers]
        # An exact sum rounds, also where a step has only one sample: then another layout may have idle processes.
        self.leaves_one_to_torch = self.replicas == 1 and not (gradients.exact and layout.pieces > 1)
        self.active = False
        self.versions: list[int] = []
        self.after: list[Tensor] = []  # with one piece: the buffers and counters after its forward pass
        # the buffers before the step, the counters before the step, and the sum of the buffers after the pieces
        self.start = [torch.empty_like(buffer) for buffer in self.buffers]
        self.start_counts = [torch.empty_like(counter) for counter in self.counters]
        pairs = zip(self.buffers, self.wide, strict=True)
        self.total = [torch.empty_like(buffer, dtype=dtype) for buffer, dtype in pairs]
        # Statistics have the order of 1 and start at exactly 0, so the grid need not be finer than 2**-45.
        self.exact_sum: ExactSum | None = None
        if gradients.exact:
            owners = [layer for layer in self.layers for _ in kinds]  # of each buffer
            summed_here = [gradients.strategy.holds(layer) for layer in owners]
            names = [f"{name}.{kind}" if name else kind for name in layers for kind in kinds]
            self.exact_sum = gradients.exact_sum(self.buffers, 0, segment_ids(module, owners), summed_here, names)
            if len(exponents) == len(self.exact_sum.exponents):  # else the checkpoint's run had other layers
                self.exact_sum.exponents = list(exponents)

    def begin(self, step_batch: StepBatch) -> None:
        """Save the statistics before a step. A step with one piece may be left to torch."""
        self.active = bool(self.buffers) and not (step_batch.num_nonempty == 1 and self.leaves_one_to_torch)
        if self.active:
            torch._foreach_copy_(self.start, self.buffers)
            torch._foreach_copy_(self.start_counts, self.counters)
            if self.exact_sum is not None:
                self.exact_sum.begin(step_batch.step)
            else:
                torch._foreach_zero_(self.total)

    def before_forward(self) -> None:
        """Restore the statistics before the step, for the next micro-batch."""
        if self.active:
            # `.data` hides the change from autograd, which may still need these tensors for a backward pass.
            torch._foreach_copy_([buffer.data for buffer in self.buffers], self.start)
            torch._foreach_copy_(self.counters, self.start_counts)  # with `momentum=None` they set the weight

    def after_forward(self) -> None:
        """Add the statistics after a micro-batch to the step's sum."""
        if self.active and self.exact_sum is not None:
            self.exact_sum.add(self.buffers)
        elif self.active:
            pairs = zip(self.buffers, self.wide, strict=True)
            torch._foreach_add_(self.total, [buffer.to(dtype) for buffer, dtype in pairs])
        elif self.buffers:
            self.after = self.after or [torch.empty_like(tensor) for tensor in (*self.buffers, *self.counters)]
            torch._foreach_copy_(self.after[: len(self.buffers)], self.buffers)
            torch._foreach_copy_(self.after[len(self.buffers) :], self.counters)
            self.versions = [tensor._version for tensor in (*self.buffers, *self.counters)]

    def finish(self, step_batch: StepBatch) -> None:
        """Set the statistics to the mean over the step's pieces. Every process calls this."""
        if not self.active:
            present = [*self.buffers, *self.counters]
            versions = [tensor._version for tensor in present]
            if versions != self.versions:  # activation checkpointing has computed the layers again
                torch._foreach_copy_(present, self.after)
            return
        if self.exact_sum is not None:
            reduce = all_reduce if self.replicas > 1 else reduce_alone
            means = self.exact_sum.total(reduce, step_batch.num_nonempty)
        else:
            if self.replicas > 1:
                dist.all_reduce(flat := parameters_to_vector(self.total))
                vector_to_parameters(flat, self.total)
            torch._foreach_div_(self.total, step_batch.num_nonempty)
            means = list(self.total)
        for at, layer in enumerate(self.layers):
            if not layer.training:  # frozen by `eval()`: keep the values, since a mean of equal numbers may round
                means[2 * at : 2 * at + 2] = self.start[2 * at : 2 * at + 2]
        torch._foreach_copy_(self.buffers, means)
        torch._foreach_copy_(self.counters, self.start_counts)
        torch._foreach_add_(self.counters, [int(layer.training) for layer in self.layers])
