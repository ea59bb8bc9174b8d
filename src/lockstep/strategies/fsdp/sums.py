"""The gradient of a step where each process keeps a part of it (`strategy.py`): up to rounding, or exact.

The exact sum is that of `lockstep.arithmetic.exact_sum`. In each piece, the whole gradient of a tensor is rounded to
the tensor's grid. A reduce-scatter sums the integers over the processes, and each process adds those of its part over
the pieces. They become floating-point numbers once, at the end of the step. Parameters that are whole on each device
are summed as with ddp.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.arithmetic.exact_sum import AllReduce, ExactSum, _largest
from lockstep.step.batch import StepBatch
from lockstep.step.gradients import ExactGradientSum, GradientSum, trained_parameters
from lockstep.strategies.fsdp.parameters import ShardedParameter
from lockstep.strategies.fsdp.strategy import FullySharded


class ShardedSum(ExactSum):
    """An exact sum of which this process gets a part of some tensors, and the whole of the others.

    Args:
        like: tensors with the shapes, strides and device of the addends.
        segment_ids: see `ExactSum`.
        sharded: for each tensor how it is cut; None: it is not. A tensor that is cut shares no grid with others.
        device: the device of the sums.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        segment_ids: Sequence[int],
        sharded: Sequence[ShardedParameter | None],
        device: torch.device,
    ) -> None:
        whole = [each is None for each in sharded]
        super().__init__(like, None, segment_ids, whole, device=device)
        self.sharded = {g: each for g, (index, *_) in enumerate(self.groups) if (each := sharded[index]) is not None}
        self.group_of = {id(each): g for g, each in self.sharded.items()}
        for g, each in self.sharded.items():
            self.sizes[g] = each.part_size
            self.parts[g] = torch.zeros(each.part_size, dtype=torch.int64, device=device)
        self.agreed: dict[int, int] = {}  # the exponents of the grids of what outgrew its grid, by group

    def begin(self, step: int = 0) -> None:
        """Start the sum of a step."""
        super().begin(step)
        self.agreed = {}
        for g in getattr(self, "sharded", ()):
            self.parts[g].zero_()

    def add_parts(self, parameters: Sequence[ShardedParameter], flats: Sequence[Tensor] | None, group: Any) -> None:
        """Add the gradients of some sharded tensors. Every process calls this.

        Args:
            parameters: the tensors.
            flats: their whole gradients, as the parts of all processes, one after the other, padded; None: this process
                adds nothing.
            group: the process group.
        """
        groups = [self.group_of[id(parameter)] for parameter in parameters]
        for number, g in enumerate(groups):
            flat = None if flats is None else flats[number]
            if flat is not None:
                self.present[self.groups[g][0]] = True
            units = torch.zeros(0, dtype=torch.int64, device=self.device)
            fits = False
            if flat is not None:
                units = torch.empty(len(flat), dtype=torch.int64, device=self.device)
                fits = self._fits(flat, g, units)
                if fits:
                    self.num_added[g] += 1
                else:
                    self._put_aside(g, flat)
            if self.grid_exponents[g] is None:  # on no process
                continue
            if not fits:
                size = self.sizes[g] * self.sharded[g].world_size
                units = torch.zeros(size, dtype=torch.int64, device=self.device)
            self.parts[g] += _scattered(units, self.sizes[g], group)

    def _fits(self, flat: Tensor, g: int, units: Tensor) -> bool:
        """Round an addend to its group's grid, into `units`. Return whether it fits the grid."""
        if self.in_chunks:
            return self._round(flat, g, units, first=True)
        limit = self._limit(g)
        if not limit or not _largest([flat], False)[0] < limit:
            return False
        units.copy_(self._rounded(flat, g))
        return True

    def _agree_on_grids(self, all_reduce: AllReduce) -> tuple[dict[int, int], set[int], Tensor]:
        agreed, broken, agreement = super()._agree_on_grids(all_reduce)
        self.agreed = agreed
        return agreed, broken, agreement

    def unpack(self, all_reduce: AllReduce, divisor: float) -> tuple[list[Tensor], list[float]]:
        """Do what `ExactSum.unpack` does.

        Returns:
            The sums, of sharded tensors this process's part, padded; and the largest elements of all groups that are
            summed whole, and then of those that are sharded.
        """
        sums, maxima = super().unpack(all_reduce, divisor)
        if not self.sharded:
            return sums, maxima
        flats = []
        for g, each in self.sharded.items():
            outgrown = None
            if g in self.agreed:
                size = self.sizes[g] * each.world_size
                part = _scattered(self._outgrown_units(g, self.agreed[g], size), self.sizes[g], None)
                outgrown = part.double().mul_(2.0 ** self.agreed[g])
            flats.append(self._result(g, outgrown, divisor))
        largest = torch.tensor(_largest(flats, self.in_chunks), dtype=torch.float64, device=self.device)
        all_reduce(largest, "max")
        for g, flat in zip(self.sharded, flats, strict=True):
            index = self.groups[g][0]
            sums[index] = flat.fill_(torch.nan) if index in self.broken else flat
        return sums, [*maxima, *(value * divisor for value in largest.tolist())]

    def update_grids(self, maxima: Sequence[float]) -> None:
        """Choose the grids of later sums from `maxima`, which `unpack` has returned."""
        local, sharded = len(self.local_groups), list(self.sharded)
        if len(maxima) != local + len(sharded):
            return
        super().update_grids(maxima[:local])
        for g, largest in zip(sharded, maxima[local:], strict=True):
            self.exponents[g] = self._next(self.exponents[g], largest)


def _scattered(units: Tensor, size: int, group: Any) -> Tensor:
    """Return this process's part of the sum of integers over all processes; `size` elements."""
    received = torch.empty(size, dtype=torch.int64, device=units.device)
    dist.reduce_scatter_tensor(received, units, group=group)
    return received


class ShardedGradientSum(GradientSum):
    """Sum the gradients up to rounding. `fully_shard` adds up this process's parts."""

    strategy: Any

    def __init__(self, strategy: FullySharded, replicas: int) -> None:
        super().__init__(strategy, replicas)
        strategy.receive = self.receive

    def receive(self, parameters: Sequence[ShardedParameter], whole: Tensor, part: Tensor, group: Any) -> None:
        """Sum the gradients of a unit over the processes. `part` gets this process's part."""
        dist.reduce_scatter_tensor(part, whole, group=group)

    def begin(self, step_batch: StepBatch) -> None:
        """Start a step."""
        super().begin(step_batch)
        self.strategy.begin_step(step_batch)
        for parameter in self.strategy.sharded.values():
            parameter.tensor.grad = None

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters that each process has whole."""
        return [p for p in trained_parameters(self.strategy.lightning_module) if id(p) not in self.strategy.sharded]

    def reduce(self, step_batch: StepBatch) -> None:
        """Sum the gradients of whole parameters, and give the optimizer those of the parts."""
        super().reduce(step_batch)
        scale = self.scale(step_batch)
        for parameter in self.strategy.sharded.values():
            if (gradient := parameter.tensor.grad) is not None:
                part = gradient.to_local()
                self.strategy.set_gradient(parameter, part if scale == 1 else part * scale)
        self.strategy.give_gradients()


class ShardedExactGradientSum(ExactGradientSum):
    """Sum independently of the order. The sums have the bits of `ExactGradientSum` on one device."""

    strategy: Any

    def __init__(self, strategy: FullySharded, replicas: int) -> None:
        super().__init__(strategy, replicas)
        strategy.receive, strategy.exact = self.receive, True

    def receive(self, parameters: Sequence[ShardedParameter], whole: Tensor, part: Tensor, group: Any) -> None:
        """Add the gradients of a unit to the sum. `part`, which `fully_shard` adds up, gets nothing."""
        flats = None
        if self.strategy.counts:
            rows = whole.view(self.replicas, -1)
            columns = rows.split([parameter.part_size for parameter in parameters], dim=1)
            flats = [each.reshape(-1) for each in columns]
        self.sum.add_parts(parameters, flats, group)
        part.zero_()

    def begin(self, step_batch: StepBatch) -> None:
        """Start a step. Drop gradients, which `fully_shard` would add to."""
        self.strategy.begin_step(step_batch)
        super().begin(step_batch)

    def _make_sum(self, parameters: list[torch.nn.Parameter], segments: list[int]) -> ExactSum:
        sharded = [self.strategy.sharded.get(id(p)) for p in parameters]
        pairs = zip(parameters, sharded, strict=True)
        like = [
            p.detach() if each is None else torch.empty_strided(each.shape, each.strides, dtype=p.dtype, device="meta")
            for p, each in pairs
        ]
        made = ShardedSum(like, segments, sharded, self.strategy.root_device)
        self.strategy.bytes_of_sums = sum(part.numel() * part.element_size() for part in made.parts)
        return made

    def collect(self) -> None:
        """Add the gradient of a piece to the sum, as far as `receive` has not done so, and drop it."""
        sharded = self.strategy.sharded
        values = [None if id(p) in sharded else p.grad for p in self.trained.values()]
        self.sum.add(values, unchanged=True)
        self._reset()

    def reduce(self, step_batch: StepBatch) -> None:
        """Sum the gradients of whole parameters, and give the optimizer those of the parts."""
        super().reduce(step_batch)
        self.strategy.give_gradients()

    def set_gradient(self, parameter: torch.nn.Parameter, gradient: Tensor | None) -> None:
        """Set the gradient of a parameter, or of this process's part of it, to its sum."""
        if (sharded := self.strategy.sharded.get(id(parameter))) is not None:
            self.strategy.set_gradient(sharded, gradient)
        else:
            parameter.grad = gradient
