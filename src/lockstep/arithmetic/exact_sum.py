"""Sums that do not depend on their order.

Floating-point addition depends on order, and every layout adds in another one. Here each addend is rounded to a grid,
an integer multiple of a power of two chosen per tensor, and integers are added: neither the order of pieces nor that of
an all-reduce matters. The idea is that of Demmel and Nguyen (Fast reproducible floating-point summation, 2013) and of
Hallberg and Adcroft (An order-invariant real-to-integer conversion sum, 2014); the rounding is the classical addition
of a large constant: in float64, `1.5 * 2**52 * q + x` is `x` rounded to a multiple of `q`, and its bits, read as an
int64, are those of the constant plus the multiple. So a sum costs one float addition and one integer addition.

The grid follows the previous sum's largest element: 45 bits below it are kept (float32 keeps 24), and 6 bits are left
for growth. What grows more is seen before it is rounded, and summed on a second grid that all processes agree on.
Neighbouring small tensors share a grid: a network has many, and each operation costs more than its arithmetic.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

BITS = 51  # |x| < 2**51 * q keeps the constant's exponent
HEAD = 6  # bits of growth between two sums
LOWEST = -900  # exponent: far below float32's least, and its grid is still a normal float64
HIGHEST = 1000  # exponent: far above float32's largest, and a grid's constant, and the sum, are still float64
SMALL = 16_384  # elements: smaller neighbours share a grid
CHUNK = 65_536  # elements: a float64 chunk stays in the second-level cache

AllReduce = Callable[[Tensor, str], None]  # (tensor, "sum" or "max") -> in place, over all processes


def reduce_alone(tensor: Tensor, op: str) -> None:
    """The all-reduce of a single process."""


class CorruptMessage(Exception):
    """A message between processes has come otherwise than it was sent. One line: the step, and of which tensors."""


class ExactSum:
    """The sum of equally shaped lists of tensors, whatever their order and wherever they were added.

    Args:
        like: tensors that the addends have the shape, strides and device of.
        floor: exponent below which a grid does not shrink; None: it follows the sums all the way down.
        segment_ids: a number for each tensor; those with different ones share no grid.
        summed_here: whether each tensor is summed here, alike for all of one segment; `total` returns others as `like`
            has them.
        names: of the tensors; given, messages are checked: each carries the sums mod 2**64 of its parts, which are
            linear, so that those of what arrives must be the sums that arrive.

    Attributes:
        local_groups: the groups of tensors that are summed here.
        present: for each tensor, whether any addend had it; after `total`, on any process.
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
        # one all-reduce for all: the elements in units of their grid with the constant's bits, how often each group's
        # constant is in them, how many addends outgrew their grids, and which tensors were given at all
        counts = len(self.groups) + 1 + len(self.like)
        # and where it is checked, the sums of all these
        self.names, checks = names, len(self.groups) + 1 if names else 0
        self.units = torch.zeros(sum(self.sizes) + counts + checks, dtype=torch.int64, device=self.device)
        *self.parts, self.counts, self.checks = self.units.split([*self.sizes, counts, checks])
        self.scratch = torch.empty(CHUNK, dtype=torch.float64, device=self.device)
        self.begin()

    def begin(self, step: int = 0) -> None:
        """Starts a new sum, of a step that is named where a message is damaged."""
        self.step = step
        self.present = [False] * len(self.like)
        self.outgrown: list[tuple[int, Tensor]] = []
        self.rounded = [0] * len(self.groups)  # how often a group's constant was added with its elements
        self.grids = [None if e is None else e + HEAD - BITS for e in self.exponents]

    def add(self, values: Sequence[Tensor | None]) -> None:
        """Adds one list of tensors; None counts as zeros."""
        self.present = [present or value is not None for present, value in zip(self.present, values, strict=True)]
        flats = [self._flat(self.groups[at], values) for at in self.local_groups]
        # on CPU, `_round` looks at each chunk when it is in the cache
        bounds = [0.0] * len(flats) if self.device.type == "cpu" else _bounds(flats)
        for at, flat, bound in zip(self.local_groups, flats, bounds, strict=True):
            grid = self.grids[at]
            room = 0.0 if grid is None else 2.0 ** (grid + BITS - 1)  # what an element must stay below
            if bound < room and self._round(flat, self.parts[at], _constant(grid), room, not self.rounded[at]):
                self.rounded[at] += 1
            else:  # nan too. Until all are there it waits in the host's memory, which is larger
                self.outgrown.append((at, flat.to("cpu", copy=True)))

    def total(self, all_reduce: AllReduce = reduce_alone, divisor: float = 1.0) -> list[Tensor]:
        """The sum over all processes, divided by `divisor`, in the dtype and layout of `like`. All must call it.

        A tensor to which something that is not finite was added, or in float64 something of 2**1000 or more, comes back
        as nan, on every process.
        """
        all_reduce(self.pack(), "sum")
        sums, bounds = self.unpack(all_reduce, divisor)
        self.update_grids(bounds)
        return sums

    def pack(self) -> Tensor:
        """The first half of `total`, after which nothing is added: what all processes are to sum, in place."""
        for part, rounded in zip(self.parts, self.rounded, strict=True):
            if not rounded:
                part.zero_()
        self.counts.copy_(torch.tensor([*self.rounded, len(self.outgrown), *self.present]))
        if self.names:
            self.checks.copy_(_sums([*self.parts, self.counts]))
        return self.units

    def unpack(self, all_reduce: AllReduce, divisor: float) -> tuple[list[Tensor], list[float]]:
        """The second half, once what `pack` returned is summed: the sums, and what `update_grids` takes.

        Raises:
            CorruptMessage: it is not what was sent; on the processes where it is not.
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
        """The grids of the sums that begin from now on follow those of which these are the largest elements."""
        for at, bound in zip(self.local_groups, bounds, strict=True):
            self.exponents[at] = self._next(self.exponents[at], bound)

    def _check(self, parts: Sequence[Tensor], sums: Tensor, groups: Sequence[int]) -> None:
        """Compares parts of a message, first those of the `groups`, with the sums that came with it."""
        if wrong := (_sums(parts) != sums).nonzero().flatten().tolist():
            tensors = [index for at in wrong if at < len(groups) for index in self.groups[groups[at]]]
            of = f" of {self.names[tensors[0]]} to {self.names[tensors[-1]]}" if self.names and tensors else ""
            raise CorruptMessage(
                f"step {self.step + 1}: the sums{of} are not those of what the ranks sent; none was applied"
            )

    # --- one group of tensors ---

    def _next(self, old: int | None, bound: float) -> int | None:
        """The exponent of the next sum. A sum of zero may be one that fell below its grid: the grid follows it down."""
        least = LOWEST if self.floor is None else self.floor
        if bound:
            return min(max(math.frexp(bound)[1], least), HIGHEST)
        return old if old is None else max(old - (BITS - HEAD), least)

    def _flat(self, group: list[int], values: Sequence[Tensor | None]) -> Tensor:
        """The group's elements in the order in which `like` stores them; a tensor by itself is not copied."""
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
        """Views of the groups' elements with the shapes and strides of `like`, by their number there."""
        views: dict[int, Tensor] = {}
        for at, flat in zip(self.local_groups, flats, strict=True):
            sizes = [self.like[index].numel() for index in self.groups[at]]
            for index, part in zip(self.groups[at], flat.split(sizes), strict=True):
                shape, strides = self.like[index].shape, self.like[index].stride()
                dense = self.dense[index]
                views[index] = part.as_strided(shape, strides, part.storage_offset()) if dense else part.view(shape)
        return views

    def _round(self, flat: Tensor, units: Tensor, constant: float, room: float, first: bool) -> bool:
        """Adds the elements, rounded, and the constant's bits with each of them; the first ones overwrite what is
        there. On CPU by numpy: the same IEEE additions, and half of the time; returns whether all of the elements stay
        below `room`, else the sum is as before."""
        if self.device.type != "cpu":
            add = Tensor.copy_ if first else Tensor.add_
            add(units, flat.double().add_(constant).view(torch.int64))
            return True
        values, sums, scratch = flat.numpy(), units.numpy(), self.scratch.numpy()

        def rounded(start: int, into: np.ndarray) -> np.ndarray:
            np.copyto(into, values[start : start + CHUNK])  # by itself: np.add converts in smaller parts
            into += constant
            return into.view(np.int64)

        for start in range(0, len(values), CHUNK):
            part, into = values[start : start + CHUNK], sums[start : start + CHUNK]
            if not max(-float(np.minimum.reduce(part)), float(np.maximum.reduce(part))) < room:  # nan is handed on
                for before in range(0, 0 if first else start, CHUNK):
                    sums[before : before + CHUNK] -= rounded(before, scratch)
                return False
            if first:
                rounded(start, into.view(np.float64))
            else:
                into += rounded(start, scratch[: len(part)])
        return True

    def _result(self, at: int, extra: Tensor | None, divisor: float) -> Tensor:
        grid = self.grids[at] or 0
        constants = self.rounded[at] * _bits(_constant(grid))
        constants = (constants + 2**63) % 2**64 - 2**63  # as int64 arithmetic wraps it
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

    # --- what outgrew its grid ---

    def _outgrown_total(self, all_reduce: AllReduce) -> tuple[dict[int, Tensor], set[int]]:
        """All processes agree on the largest exponents, then sum on that grid. Rare, but each run's first step.

        Returns the sums by group, and the tensors to which something that is not finite was added.
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
            # and whether all have come to the same exponents
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
    """The largest absolute value of each tensor, nan where it holds one."""
    if not flats:
        return []
    if flats[0].device.type == "cpu":  # numpy takes half of the time, and hands on nan as torch does
        return [max(-float(flat.numpy().min(initial=0)), float(flat.numpy().max(initial=0))) for flat in flats]
    ends = torch.stack([end for flat in flats for end in torch.aminmax(flat if len(flat) else flat.new_zeros(1))])
    low, high = ends.double().view(-1, 2).unbind(1)
    return torch.maximum(-low, high).tolist()


def _sums(parts: Sequence[Tensor]) -> Tensor:
    """The sum of each part mod 2**64."""
    return torch.stack([part.sum() for part in parts])


def _constant(grid: int | None) -> float:
    """What rounds a float64 to a multiple of 2**grid when it is added; 2**0 where no grid is known yet."""
    return 1.5 * 2.0 ** (52 + (grid or 0))


def _bits(constant: float) -> int:
    return int(np.float64(constant).view(np.int64))


def _group(like: Sequence[Tensor], segment_ids: Sequence[int]) -> list[list[int]]:
    """Neighbouring small tensors of one dtype and segment together, large ones by themselves."""
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
    """Whether the elements fill their memory without gaps: such tensors can be read as they are stored."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
