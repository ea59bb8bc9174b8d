"""Sums that do not depend on their order.

Floating-point addition depends on order, and every layout adds in another one. Here each addend is rounded to a grid,
an integer multiple of a power of two chosen per tensor, and integers are added: neither the order of pieces nor that of
an all-reduce matters. The idea is that of Demmel and Nguyen (Fast reproducible floating-point summation, 2013) and of
Hallberg and Adcroft (An order-invariant real-to-integer conversion sum, 2014); the rounding is the classical addition
of a large constant: in float64, `1.5 * 2**52 * q + x` is `x` rounded to a multiple of `q`, and its bits, read as an
int64, are those of the constant plus the multiple. So a sum costs one float addition and one integer addition.

The grid follows the previous sum's largest element: 45 bits below it are kept (float32 keeps 24), and 6 bits are left
for growth. What grows more is seen before it is rounded, and summed on a second grid that all processes agree on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

BITS = 51  # |x| < 2**51 * q keeps the constant's exponent
HEAD = 6  # bits of growth between two sums
LOWEST = -900  # exponent: far below float32's least, and its grid is still a normal float64
CHUNK = 32_768  # elements: a float64 chunk stays in the second-level cache

AllReduce = Callable[[Tensor, str], None]  # (tensor, "sum" or "max") -> in place, over all processes


def alone(tensor: Tensor, op: str) -> None:
    """The all-reduce of a single process."""


class ExactSum:
    """The sum of equally shaped lists of tensors, whatever their order and wherever they were added.

    Args:
        like: tensors that the addends have the shape, strides and device of.
        floor: exponent below which the grid of a tensor does not shrink; None: it follows the sums all the way down.
    """

    def __init__(self, like: Sequence[Tensor], floor: int | None = None) -> None:
        self.like = list(like)
        self.floor = floor
        self.device = self.like[0].device if self.like else torch.device("cpu")
        self.dense = [_dense(tensor) for tensor in self.like]
        self.exponents: list[int | None] = [floor] * len(
            self.like
        )  # largest element < 2**exponent; None: not known yet
        self.sizes = [tensor.numel() for tensor in self.like]
        self.starts = [sum(self.sizes[:index]) for index in range(len(self.sizes))]
        # one all-reduce for all: the elements in units of their grid, and last, how many addends outgrew their grids
        self.units = torch.zeros(sum(self.sizes) + 1, dtype=torch.int64, device=self.device)
        self.scratch = torch.empty(CHUNK, dtype=torch.float64, device=self.device)
        self.groups = _group(self.sizes)
        self.begin()

    def begin(self) -> None:
        """Starts a new sum."""
        self.units.zero_()
        self.late: list[tuple[int, Tensor]] = []
        self.rounded = [0] * len(self.like)  # how often the constant of a tensor was added with an element
        self.grids = [None if e is None else e + HEAD - BITS for e in self.exponents]
        self.constants = [self._constants(group) if len(group) > 1 else None for group in self.groups]

    def add(self, values: Sequence[Tensor]) -> None:
        """Adds one list of tensors."""
        flat = [self._flat(value, index) for index, value in enumerate(values)]
        late = {index for index, bound in enumerate(_bounds(flat)) if not bound < self._room(index)}  # also nan
        self.late += [(index, flat[index].clone()) for index in late]
        for group, constants in zip(self.groups, self.constants, strict=True):
            if constants is not None and late.isdisjoint(group):
                rounded = self.scratch[: len(constants)]
                torch.cat([flat[index] for index in group], out=rounded)
                start = self.starts[group[0]]
                _add(self.units[start : start + len(constants)], rounded.add_(constants))
            else:
                for index in set(group) - late:
                    self._round(flat[index], self.units, self.starts[index], self._constant(index))
            for index in set(group) - late:
                self.rounded[index] += 1

    def total(self, all_reduce: AllReduce = alone, divisor: float = 1.0) -> list[Tensor]:
        """The sum over all processes, divided by `divisor`, in the dtype and layout of `like`. All must call it.

        A tensor to which something that is not finite was added comes back as nan, on every process.
        """
        for index, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            if self.rounded[index]:
                self.units[start : start + size] -= _wrapped(self.rounded[index] * _bits(self._constant(index)))
        self.units[-1] = len(self.late)
        all_reduce(self.units, "sum")
        extra, broken = self._late_total(all_reduce) if int(self.units[-1]) else ({}, set())
        sums = [self._result(index, extra.get(index), divisor, index in broken) for index in range(len(self.like))]
        for index, bound in enumerate(_bounds([self._flat(total, index) for index, total in enumerate(sums)])):
            if math.isfinite(bound):  # what is not finite leaves a grid as it is
                self.exponents[index] = self._next(self.exponents[index], bound * divisor)
        return sums

    # --- one tensor ---

    def _next(self, old: int | None, bound: float) -> int | None:
        """The exponent of the next sum. A sum of zero may be one that fell below its grid: the grid follows it down."""
        least = LOWEST if self.floor is None else self.floor
        if bound:
            return max(math.frexp(bound)[1], least)
        return old if old is None else max(old - (BITS - HEAD), least)

    def _room(self, index: int) -> float:
        """What an element must stay below to be rounded to its tensor's grid."""
        grid = self.grids[index]
        return 0.0 if grid is None else 2.0 ** (grid + BITS - 1)

    def _constant(self, index: int) -> float:
        grid = self.grids[index]
        assert grid is not None
        return 1.5 * 2.0 ** (52 + grid)

    def _constants(self, group: list[int]) -> Tensor:
        parts = [
            torch.full((self.sizes[i],), 0.0 if self.grids[i] is None else self._constant(i), dtype=torch.float64)
            for i in group
        ]
        return torch.cat(parts).to(self.device)

    def _flat(self, value: Tensor, index: int) -> Tensor:
        """The elements in the order in which `like` stores them, without a copy where strides agree."""
        like = self.like[index]
        if not self.dense[index]:
            return value.reshape(-1)
        if value.stride() != like.stride():
            value = torch.empty_like(like, dtype=value.dtype).copy_(value)
        return value.as_strided((self.sizes[index],), (1,))

    def _round(self, flat: Tensor, units: Tensor, start: int, constant: float) -> None:
        """Adds the elements, rounded, and the constant's bits with each of them."""
        for at in range(0, flat.numel(), CHUNK):
            part = flat[at : at + CHUNK]
            rounded = self.scratch[: part.numel()].copy_(part).add_(constant)
            _add(units[start + at : start + at + part.numel()], rounded)

    def _result(self, index: int, extra: Tensor | None, divisor: float, broken: bool) -> Tensor:
        like, start = self.like[index], self.starts[index]
        result = torch.empty_like(like, requires_grad=False)
        flat = (
            self._flat(result, index)
            if self.dense[index]
            else torch.empty(self.sizes[index], dtype=like.dtype, device=self.device)
        )
        scale = 0.0 if self.grids[index] is None else 2.0 ** self.grids[index]  # type: ignore[operator]
        for at in range(0, self.sizes[index], CHUNK):
            part = flat[at : at + CHUNK]
            exact = self.scratch[: part.numel()].copy_(self.units[start + at : start + at + part.numel()]).mul_(scale)
            if extra is not None:
                exact += extra[at : at + CHUNK]
            part.copy_(exact.div_(divisor))
        if broken:
            flat.fill_(math.nan)
        return result if self.dense[index] else flat.view(like.shape)

    # --- what outgrew its grid ---

    def _late_total(self, all_reduce: AllReduce) -> tuple[dict[int, Tensor], set[int]]:
        """All processes agree on the largest exponents, then sum on that grid. Rare, but each run's first step."""
        none = -100_000
        exponents = torch.full((len(self.like), 2), none, dtype=torch.int64, device=self.device)
        finite = {at: math.isfinite(bound) for at, bound in enumerate(_bounds([value for _, value in self.late]))}
        for at, (index, value) in enumerate(self.late):
            if finite[at]:
                exponents[index, 0] = max(int(exponents[index, 0]), exponent(value))
            else:
                exponents[index, 1] = 1
        all_reduce(exponents, "max")
        agreed = {index: int(e) for index, e in enumerate(exponents[:, 0].tolist()) if e != none}
        units = {index: torch.zeros(self.sizes[index], dtype=torch.int64, device=self.device) for index in agreed}
        constants = {index: 1.5 * 2.0 ** (52 + agreed[index] + 2 - BITS) for index in agreed}
        for at, (index, value) in enumerate(self.late):
            if finite[at]:
                self._round(value, units[index], 0, constants[index])
                units[index] -= _bits(constants[index])
        if units:
            flat = torch.cat(list(units.values()))
            all_reduce(flat, "sum")
            units = dict(zip(units, flat.split([part.numel() for part in units.values()]), strict=True))
        extra = {index: part.double().mul_(2.0 ** (agreed[index] + 2 - BITS)) for index, part in units.items()}
        return extra, {index for index, bad in enumerate(exponents[:, 1].tolist()) if bad == 1}


def exponent(value: Tensor) -> int:
    """The least e with |x| < 2**e for every element."""
    return math.frexp(_bounds([value])[0])[1]


def _bounds(flat: Sequence[Tensor]) -> list[float]:
    """The largest absolute value of each tensor, nan where it holds one."""
    if not flat:
        return []
    ends = torch.stack(
        [end for value in flat for end in (torch.aminmax(value) if value.numel() else (value.new_zeros(()),) * 2)]
    )
    low, high = ends.double().view(-1, 2).unbind(1)
    return torch.maximum(-low, high).tolist()


def _add(units: Tensor, rounded: Tensor) -> None:
    """`units += bits of rounded`; numpy's int64 addition is about three times as fast as torch's on CPU."""
    bits = rounded.view(torch.int64)
    if units.device.type == "cpu":
        np.add(units.numpy(), bits.numpy(), out=units.numpy())
    else:
        units.add_(bits)


def _bits(constant: float) -> int:
    return int(np.float64(constant).view(np.int64))


def _wrapped(value: int) -> int:
    """An integer as int64 arithmetic wraps it."""
    return (value + 2**63) % 2**64 - 2**63


def _group(sizes: Sequence[int]) -> list[list[int]]:
    """Neighbouring small tensors are added in one operation, large ones by themselves."""
    groups: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if size <= room:
            groups[-1].append(index)
            room -= size
        else:
            groups.append([index])
            room = CHUNK - size
    return groups


def _dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps: such tensors can be read as they are stored."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
