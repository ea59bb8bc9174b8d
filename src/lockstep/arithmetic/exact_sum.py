"""Sums that do not depend on their order.

The result of floating-point addition depends on the order, and each layout adds in a different order. Here each addend
is rounded to an integer multiple of `q`, a power of two that is chosen per tensor. Integers are then added, so neither
the order of the pieces nor the order inside an all-reduce changes the sum. The idea is from Demmel and Nguyen (Fast
reproducible floating-point summation, 2013) and Hallberg and Adcroft (An order-invariant real-to-integer conversion
sum, 2014).

The rounding adds a large constant. In float64, `1.5 * 2**52 * q + x` is the constant plus `k * q`, where `k * q` is `x`
rounded to a multiple of `q`. The bits of this number, read as an int64, are the bits of the constant, plus `k`. So each
addend costs one float addition and one integer addition.

The grid follows the largest element of the previous sum: 45 bits below it are kept (float32 keeps 24), and 6 bits are
left for growth. An addend that grew more is detected before it is rounded and summed on a second grid, which all
processes choose together. Small neighbouring tensors share a grid, because a network has many of them and the overhead
of an operation is larger than its arithmetic.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

BITS = 51  # the sum with the constant keeps the constant's exponent if |x| < 2**51 * q
HEAD = 6  # bits of headroom for growth between two sums
LOWEST = -900  # smallest exponent: far below float32's, and its grid is still a normal float64
HIGHEST = 1000  # largest exponent: far above float32's, and the grid's constant and the sum are still finite float64
SMALL = 16_384  # at most so many elements of neighbouring tensors share a grid
CHUNK = 65_536  # elements of a chunk: in float64 it fits the second-level cache

AllReduce = Callable[[Tensor, str], None]  # (tensor, "sum" or "max") -> in place, over all processes


def reduce_alone(tensor: Tensor, op: str) -> None:
    """Leave the tensor as it is: the all-reduce of a single process."""


class CorruptMessage(Exception):
    """A message between processes was damaged on its way. The text, one line, names the step and the tensors."""


class ExactSum:
    """The sum of lists of tensors, independent of their order and of the process that adds each list.

    Args:
        like: tensors with the shapes, strides and device of the addends.
        floor: smallest exponent of a grid; None: a grid follows the sums without a limit.
        segment_ids: a number for each tensor. Tensors with different numbers share no grid.
        summed_here: for each tensor, whether this process sums it; the same for all tensors of a segment. `total`
            returns the other tensors from `like`.
        names: names of the tensors; if given, messages are checked. Each message then carries checksums, the sums of
            its parts mod 2**64. They are linear, so the checksums of the result must equal the summed checksums.

    Attributes:
        local_groups: numbers of the groups of tensors that this process sums.
        present: for each tensor, whether any addend had it: before `total` on this process, afterwards on any process.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        floor: int | None = None,
        segment_ids: Sequence[int] = (),
        summed_here: Sequence[bool] = (),
        names: Sequence[str] = (),
    ) -> None:
        self.like = list(like)
        self.floor = floor
        self.device = self.like[0].device if self.like else torch.device("cpu")
        self.dense = [dense(tensor) for tensor in self.like]
        self.groups = _group(self.like, segment_ids or [0] * len(self.like))
        self.local_groups = [at for at, group in enumerate(self.groups) if not summed_here or summed_here[group[0]]]
        elements = [sum(self.like[index].numel() for index in group) for group in self.groups]
        self.sizes = [size if at in self.local_groups else 0 for at, size in enumerate(elements)]
        self.exponents: list[int | None] = [floor] * len(self.groups)  # largest element < 2**exponent; None: not known
        # One all-reduce sends everything: the elements in units of their grids, with the constants' bits; how often
        # each group's constant was added; how many addends outgrew their grids; which tensors had an addend.
        counts = len(self.groups) + 1 + len(self.like)
        # If messages are checked, the checksums follow.
        self.names, checks = names, len(self.groups) + 1 if names else 0
        self.units = torch.zeros(sum(self.sizes) + counts + checks, dtype=torch.int64, device=self.device)
        *self.parts, self.counts, self.checks = self.units.split([*self.sizes, counts, checks])
        self.scratch = torch.empty(CHUNK, dtype=torch.float64, device=self.device)
        self.begin()

    def begin(self, step: int = 0) -> None:
        """Start the sum of a step. An error message names the step."""
        self.step = step
        self.present = [False] * len(self.like)
        self.outgrown: list[tuple[int, Tensor]] = []
        self.rounded = [0] * len(self.groups)  # how often each group's constant was added, with an addend
        self.grids = [None if e is None else e + HEAD - BITS for e in self.exponents]

    def add(self, values: Sequence[Tensor | None]) -> None:
        """Add one list of tensors, in the order of `like`. None counts as zeros."""
        self.present = [present or value is not None for present, value in zip(self.present, values, strict=True)]
        flats = [self._flat(self.groups[at], values) for at in self.local_groups]
        # On a CPU, `_round` checks the bound of each chunk itself, while the chunk is in the cache.
        bounds = [0.0] * len(flats) if self.device.type == "cpu" else _bounds(flats)
        for at, flat, bound in zip(self.local_groups, flats, bounds, strict=True):
            grid = self.grids[at]
            room = 0.0 if grid is None else 2.0 ** (grid + BITS - 1)  # upper limit of an element
            if bound < room and self._round(flat, self.parts[at], _constant(grid), room, not self.rounded[at]):
                self.rounded[at] += 1
            else:  # also if the bound is nan. It waits in the host's memory, which is larger than the GPU's
                self.outgrown.append((at, flat.to("cpu", copy=True)))

    def total(self, all_reduce: AllReduce = reduce_alone, divisor: float = 1.0) -> list[Tensor]:
        """Return the sum over all processes, divided by `divisor`. Every process must call this.

        Args:
            all_reduce: reduces a tensor in place over all processes.
            divisor: divides the sum once, at the end.

        Returns:
            Tensors with the dtypes, shapes and strides of `like`. A tensor is nan on every process if any of its
            addends had an element that is not finite or, in float64, is 2**1000 or more.

        Raises:
            CorruptMessage: a message was damaged. Only the processes that received it damaged raise this.
        """
        all_reduce(self.pack(), "sum")
        sums, bounds = self.unpack(all_reduce, divisor)
        self.update_grids(bounds)
        return sums

    def pack(self) -> Tensor:
        """Do the first half of `total`: return the int64 tensor to sum in place over all processes.

        Add nothing after this.
        """
        for part, rounded in zip(self.parts, self.rounded, strict=True):
            if not rounded:
                part.zero_()
        self.counts.copy_(torch.tensor([*self.rounded, len(self.outgrown), *self.present]))
        if self.names:
            self.checks.copy_(_sums([*self.parts, self.counts]))
        return self.units

    def unpack(self, all_reduce: AllReduce, divisor: float) -> tuple[list[Tensor], list[float]]:
        """Do the second half of `total`, after the result of `pack` is summed over all processes.

        Args:
            all_reduce: as of `total`.
            divisor: as of `total`.

        Returns:
            The sums, and the largest elements of the local groups, which `update_grids` takes.

        Raises:
            CorruptMessage: a message was damaged. Only the processes that received it damaged raise this.
        """
        if self.names:
            self._check([*self.parts, self.counts], self.checks, range(len(self.groups)))
        counts = self.counts.tolist()
        groups = len(self.groups)
        self.rounded, outgrown = counts[:groups], counts[groups]
        self.present = [count > 0 for count in counts[groups + 1 :]]
        extra, broken = self._outgrown_total(all_reduce) if outgrown else ({}, set())
        flats = [self._result(at, extra.get(at), divisor) for at in self.local_groups]
        bounds = [bound * divisor for bound in _bounds(flats)]
        sums = self._shaped(flats)
        for index in broken:
            if index in sums:
                sums[index].fill_(math.nan)
        return [sums.get(index, like) for index, like in enumerate(self.like)], bounds

    def update_grids(self, bounds: Sequence[float]) -> None:
        """Choose the grids of later sums from `bounds`, the largest elements of the sum just finished."""
        for at, bound in zip(self.local_groups, bounds, strict=True):
            self.exponents[at] = self._next(self.exponents[at], bound)

    def _check(self, parts: Sequence[Tensor], sums: Tensor, groups: Sequence[int]) -> None:
        """Compare the parts of a received message with its checksums.

        Args:
            parts: first one part for each of `groups`, then others.
            sums: the received checksums, one for each part.
            groups: numbers of the groups, for the error message.

        Raises:
            CorruptMessage: a part does not match.
        """
        if wrong := (_sums(parts) != sums).nonzero().flatten().tolist():
            tensors = [index for at in wrong if at < len(groups) for index in self.groups[groups[at]]]
            of = f" of {self.names[tensors[0]]} to {self.names[tensors[-1]]}" if self.names and tensors else ""
            raise CorruptMessage(
                f"step {self.step + 1}: the sums{of} do not match what the ranks sent; none was applied"
            )

    # --- one group of tensors ---

    def _next(self, old: int | None, bound: float) -> int | None:
        """Return the exponent of a group's next sum, from the last exponent and the last sum's largest element.

        If the sum was zero, its elements may be smaller than the grid, so the exponent is lowered.
        """
        least = LOWEST if self.floor is None else self.floor
        if bound:
            return min(max(math.frexp(bound)[1], least), HIGHEST)
        return old if old is None else max(old - (BITS - HEAD), least)

    def _flat(self, group: list[int], values: Sequence[Tensor | None]) -> Tensor:
        """Return a group's elements as one vector, in the memory order of `like`. A single tensor is not copied."""
        parts = []
        for index in group:
            like, value = self.like[index], values[index]
            if value is None:
                value = torch.zeros_like(like)
            elif self.dense[index] and value.stride() != like.stride():
                value = torch.empty_like(like, dtype=value.dtype).copy_(value)
            parts.append(value.as_strided((like.numel(),), (1,)) if self.dense[index] else value.reshape(-1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _shaped(self, flats: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return views of the groups' elements with the shapes and strides of `like`, by their index in it."""
        views: dict[int, Tensor] = {}
        for at, flat in zip(self.local_groups, flats, strict=True):
            sizes = [self.like[index].numel() for index in self.groups[at]]
            for index, part in zip(self.groups[at], flat.split(sizes), strict=True):
                shape, strides = self.like[index].shape, self.like[index].stride()
                dense = self.dense[index]
                views[index] = part.as_strided(shape, strides, part.storage_offset()) if dense else part.view(shape)
        return views

    def _round(self, flat: Tensor, units: Tensor, constant: float, room: float, first: bool) -> bool:
        """Round the elements and add them to `units`, each with the constant's bits.

        On a CPU, numpy does the same IEEE additions in half of the time.

        Args:
            flat: the addend.
            units: int64 sums, changed in place.
            constant: rounds an element to the grid.
            room: upper limit of the elements. Checked on a CPU; on a GPU the caller has checked it.
            first: overwrite `units` instead of adding to it.

        Returns:
            Whether all elements are below `room`. If not, `units` is as before; after a call with `first`, the next
            call must have `first` too.
        """
        if self.device.type != "cpu":
            add = Tensor.copy_ if first else Tensor.add_
            add(units, flat.double().add_(constant).view(torch.int64))
            return True
        values, sums, scratch = flat.numpy(), units.numpy(), self.scratch.numpy()

        def rounded(start: int, into: np.ndarray) -> np.ndarray:
            np.copyto(into, values[start : start + CHUNK])  # np.add would convert in smaller parts, which is slower
            into += constant
            return into.view(np.int64)

        for start in range(0, len(values), CHUNK):
            part, into = values[start : start + CHUNK], sums[start : start + CHUNK]
            largest = max(-float(np.minimum.reduce(part)), float(np.maximum.reduce(part)))
            if not largest < room:  # also true if the part has a nan
                for before in range(0, 0 if first else start, CHUNK):
                    sums[before : before + CHUNK] -= rounded(before, scratch)
                return False
            if first:
                rounded(start, into.view(np.float64))
            else:
                into += rounded(start, scratch[: len(part)])
        return True

    def _result(self, at: int, extra: Tensor | None, divisor: float) -> Tensor:
        """Return the sum of a local group as floats: its units and what outgrew its grid, divided by `divisor`."""
        grid = self.grids[at] or 0
        constants = self.rounded[at] * _bits(_constant(grid))
        constants = (constants + 2**63) % 2**64 - 2**63  # wrapped as int64 arithmetic does
        scale = 2.0**grid
        result = torch.empty(self.sizes[at], dtype=self.like[self.groups[at][0]].dtype, device=self.device)
        for start, units in zip(range(0, len(result), CHUNK), self.parts[at].split(CHUNK), strict=False):
            part = result[start : start + CHUNK]
            exact = self.scratch[: len(part)].copy_(units.sub_(constants))
            if extra is None:
                part.copy_(exact.div_(divisor / scale))
            else:
                part.copy_(exact.mul_(scale).add_(extra[start : start + CHUNK]).div_(divisor))
        return result

    # --- addends that outgrew their grids ---

    def _outgrown_total(self, all_reduce: AllReduce) -> tuple[dict[int, Tensor], set[int]]:
        """Sum the addends that outgrew their grids, on a grid for the largest exponent over all processes.

        This happens in the first step of a run and is rare afterwards.

        Returns:
            The sums by group, and the indices of the tensors that had an addend with elements that are not finite.
        """
        none = -100_000
        exponents = torch.full((len(self.groups),), none, dtype=torch.int64)
        broken = torch.zeros(len(self.like), dtype=torch.int64)
        for at, value in self.outgrown:
            parts = value.split([self.like[index].numel() for index in self.groups[at]])
            for index, part, bound in zip(self.groups[at], parts, bounds := _bounds(parts), strict=True):
                if not bound < 2.0**HIGHEST:  # nan too
                    broken[index] = 1
                    part.zero_()
            largest = max(bound for bound in [0.0, *bounds] if bound < 2.0**HIGHEST)
            if largest:
                exponents[at] = max(int(exponents[at]), math.frexp(largest)[1])
        maxima = torch.cat([exponents, broken]).to(self.device)
        all_reduce(maxima, "max")
        exponents, broken = maxima.cpu().split([len(self.groups), len(self.like)])
        agreed = {at: e + 2 - BITS for at, e in enumerate(exponents.tolist()) if e != none}  # grids
        units = {at: torch.zeros(self.sizes[at], dtype=torch.int64, device=self.device) for at in agreed}
        for at, value in self.outgrown:
            if at in agreed:
                constant = _constant(agreed[at])
                units[at] += (value.to(self.device).double() + constant).view(torch.int64) - _bits(constant)
        if units:
            # The last part is (own sum of exponents, 1): its total is a multiple of the own sum if all are the same.
            parts = [*units.values(), torch.stack([maxima.sum(), torch.ones_like(maxima[0])])]
            flat = torch.cat([*parts, _sums(parts)])
            all_reduce(flat, "sum")
            *parts, both, checks = flat.split([*map(len, parts), len(parts)])
            consistent = torch.equal(both[0], both[1] * maxima.sum())
            self._check([*parts, both], checks if consistent else ~checks, list(units))
            units = dict(zip(units, parts, strict=True))
        extra = {at: part.double().mul_(2.0 ** agreed[at]) for at, part in units.items()}
        return extra, {index for index, bad in enumerate(broken.tolist()) if bad}


def _bounds(flats: Sequence[Tensor]) -> list[float]:
    """Return the largest absolute value of each tensor; nan if the tensor has one."""
    if not flats:
        return []
    if flats[0].device.type == "cpu":  # numpy takes half of the time and propagates nan as torch does
        return [max(-float(flat.numpy().min(initial=0)), float(flat.numpy().max(initial=0))) for flat in flats]
    ends = torch.stack([end for flat in flats for end in torch.aminmax(flat if len(flat) else flat.new_zeros(1))])
    low, high = ends.double().view(-1, 2).unbind(1)
    return torch.maximum(-low, high).tolist()


def _sums(parts: Sequence[Tensor]) -> Tensor:
    """Return the checksum of each part: its sum mod 2**64."""
    return torch.stack([part.sum() for part in parts])


def _constant(grid: int | None) -> float:
    """Return the float64 whose addition rounds to a multiple of 2**grid; of 2**0 if there is no grid yet."""
    return 1.5 * 2.0 ** (52 + (grid or 0))


def _bits(constant: float) -> int:
    """Return the bits of a float64, read as an int64."""
    return int(np.float64(constant).view(np.int64))


def _group(like: Sequence[Tensor], segment_ids: Sequence[int]) -> list[list[int]]:
    """Return groups of tensor indices: small neighbours of one dtype and segment together, large tensors alone."""
    groups: list[list[int]] = []
    room = 0
    for index, tensor in enumerate(like):
        size = tensor.numel()
        if size <= room and (tensor.dtype, segment_ids[index]) == (like[index - 1].dtype, segment_ids[index - 1]):
            groups[-1].append(index)
            room -= size
        else:
            groups.append([index])
            room = SMALL - size
    return groups


def dense(tensor: Tensor) -> bool:
    """Check whether a tensor's elements fill their memory without gaps, so that they can be read in memory order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
