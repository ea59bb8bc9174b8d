"""Sums that do not depend on their order.

The result of floating-point addition depends on the order, and each layout adds in a different order. Here each addend
is rounded to an integer multiple of `q`, a power of two that is chosen per tensor. Integers are then added, so neither
the order of the pieces nor the order inside an all-reduce changes the sum. The idea is from Demmel and Nguyen (Fast
reproducible floating-point summation, 2013) and Hallberg and Adcroft (An order-invariant real-to-integer conversion
sum, 2014).

The rounding adds a large constant. In float64, `1.5 * 2**52 * q + x` is the constant plus `k * q`, where `k * q` is `x`
rounded to a multiple of `q`. The bits of this number, read as an int64, are the bits of the constant, plus `k`. So each
addend costs one float addition and one integer addition.

The multiples of `q` are called the grid. It is chosen from the largest element of the previous sum: 45 bits below it
are kept (float32 keeps 24), and 5 bits are left for growth. An addend that grew more is detected before the rounding.
It is put aside and summed later, on a second grid, which all processes choose together. Small neighbouring tensors
share a grid, because a network has many of them and the overhead of an operation is larger than its arithmetic.
In the first step there is no previous sum, so all addends are put aside.

| word | what it is |
|---|---|
| exponent | e: the largest element of the last sum is below `2**e` |
| grid | the multiples of `q = 2**(e - 45)`; its exponent is e - 45 |
| units | an addend on the grid: the integers `k`, as int64 |
| group | tensors that share a grid |
| segment | tensors that may be in one group |

An example: the largest element was 0.8, so e = 0 and `q = 2**-45`. The addend 0.3 becomes 10,555,311,626,650 units.
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

BITS = 51  # the sum with the constant keeps the constant's exponent if |x| < 2**51 * q
ADDEND_BITS = BITS - 1  # addends are below 2**50 * q, so that 2**13 of them (layout.py) do not overflow 64 bits
HEAD = 6  # bits of BITS above the largest element of the last sum: 5 for growth, and the one that ADDEND_BITS lacks
LOWEST = -900  # smallest exponent: far below float32's, and its grid is still a normal float64
HIGHEST = 1000  # largest exponent: far above float32's, and the grid's constant and the sum are still finite float64
NO_EXPONENT = -100_000  # of a group without an addend: below every exponent, so that "max" ignores it
SMALL = 16_384  # at most so many elements of neighbouring tensors share a grid
CHUNK = 65_536  # elements of a chunk on a CPU: in float64 it fits the second-level cache
TOGETHER = 1 << 24  # elements that a GPU converts to float64 at once, in few kernels; they take 128 MiB

AllReduce = Callable[[Tensor, str], None]  # (tensor, "sum" or "max") -> in place, over all processes


def reduce_alone(tensor: Tensor, op: str) -> None:
    """Leave the tensor as it is: the all-reduce of a single process."""


class CorruptMessage(Exception):
    """A message between processes was damaged on its way. The text, one line, names the step and the tensors."""


class ExactSum:
    """The sum of lists of tensors, independent of their order and of the process that adds each list.

    Args:
        like: tensors with the shapes, strides and device of the addends.
        floor: first value and lower limit of `exponents`; None: not known at first, and LOWEST is the limit.
        segment_ids: a number for each tensor. Tensors with one number are a segment; only they may share a grid.
        summed_here: for each tensor, whether this process sums it; the same for all tensors of a segment. In place of
            the other tensors, `total` returns those of `like`.
        names: names of the tensors, for messages; empty: they have none.
        device: the device of the sums; None: that of `like`.

    Attributes:
        checks_messages: whether a message that is damaged on its way is noticed, see `CheckedSum`.
        groups: the indices of the tensors of each group. A group is the tensors that share a grid.
        local_groups: indices of the groups that this process sums.
        exponents: of each group: the largest element of its last sum is less than 2**exponent; None: not known. The
            grid of its next sum follows from it.
        grid_exponents: of each group: the grid of its present sum is the multiples of 2**grid_exponent; None: it has no
            grid yet.
        present: for each tensor, whether it was not None in some addend: of this process until `unpack`, of any process
            after it.
        broken: indices of the tensors that had an addend with elements that are not finite, after `unpack`.
    """

    checks_messages = False

    def __init__(
        self,
        like: Sequence[Tensor],
        floor: int | None = None,
        segment_ids: Sequence[int] = (),
        summed_here: Sequence[bool] = (),
        names: Sequence[str] = (),
        device: torch.device | None = None,
    ) -> None:
        self.like = list(like)
        self.floor = floor
        self.device = device or (self.like[0].device if self.like else torch.device("cpu"))
        self.in_chunks = self.device.type == "cpu"  # for its cache; a GPU takes many groups in one kernel
        self.dense = [dense(tensor) for tensor in self.like]
        self.groups = _group(self.like, segment_ids or [0] * len(self.like))
        self.local_groups = [g for g, group in enumerate(self.groups) if not summed_here or summed_here[group[0]]]
        elements = [sum(self.like[index].numel() for index in group) for group in self.groups]
        self.sizes = [size if g in self.local_groups else 0 for g, size in enumerate(elements)]
        self.exponents: list[int | None] = [floor] * len(self.groups)
        # One all-reduce sends everything: the elements in units of their grids, with the constants' bits; how often
        # each group's constant was added; how many addends outgrew their grids; which tensors had an addend.
        counts = len(self.groups) + 1 + len(self.like)
        # If messages are checked, the checksums follow.
        self.names, checks = names, (len(self.groups) + 1) * self.checks_messages
        self.message = torch.zeros(sum(self.sizes) + counts + checks, dtype=torch.int64, device=self.device)
        *self.parts, self.counts, self.checks = self.message.split([*self.sizes, counts, checks])
        self.scratch = torch.empty(CHUNK * self.in_chunks, dtype=torch.float64, device=self.device)
        self.begin()

    def begin(self, step: int = 0) -> None:
        """Start the sum of a step. An error message names the step."""
        self.step = step
        self.present = [False] * len(self.like)
        self.broken: set[int] = set()
        self.outgrown: list[tuple[int, Tensor]] = []
        # on a GPU: the groups and addends of the last `add`, their largest elements, and when the host can read these
        self.unchecked: tuple[list[tuple[int, Tensor]], Tensor, torch.cuda.Event | None] | None = None
        self.counts_alone: list[int] | None = None  # the message's counts, if this is the only process
        self.num_added = [0] * len(self.groups)  # how many addends of each group were added, each with the constant
        self.grid_exponents = [None if e is None else e + HEAD - BITS for e in self.exponents]

    def add(self, values: Sequence[Tensor | None], unchanged: bool = False) -> None:
        """Add one list of tensors, in the order of `like`. None counts as zeros.

        Args:
            values: the tensors.
            unchanged: whether they keep their elements until the next call, so that no copy is needed.
        """
        self.present = [present or value is not None for present, value in zip(self.present, values, strict=True)]
        self._check_last()
        # A group without a value adds nothing. Its zeros would never get a grid, if no addend ever has a value for it.
        groups = [g for g in self.local_groups if any(values[index] is not None for index in self.groups[g])]
        if not self.in_chunks:
            self._add_together(groups, values, unchanged)
            return
        for g in groups:
            flat = self._flat(self.groups[g], values)
            if self._round(flat, g, self.parts[g], first=not self.num_added[g]):
                self.num_added[g] += 1
            else:
                self._put_aside(g, flat)

    def _add_together(self, groups: list[int], values: Sequence[Tensor | None], unchanged: bool) -> None:
        """Do what `add` does on a GPU, in few kernels for all groups; `_check_last` checks the elements later."""
        flats: dict[int, Tensor] = {}
        for g in groups:
            flat = self._flat(self.groups[g], values)
            if self._limit(g):
                is_copy = unchanged or len(self.groups[g]) > 1
                flats[g] = flat if is_copy else flat.clone()
            else:
                self._put_aside(g, flat)
        for first in (True, False):
            for batch in self._together(g for g in flats if first == (not self.num_added[g])):
                units = [self.parts[g] for g in batch]
                wide = units if first else [torch.empty_like(each) for each in units]  # the first addend overwrites
                rounded = [each.view(torch.float64) for each in wide]
                torch._foreach_copy_(rounded, [flats[g] for g in batch])
                torch._foreach_add_(rounded, [_constant(self.grid_exponents[g]) for g in batch])
                if not first:
                    torch._foreach_add_(units, wide)
        for g in flats:
            self.num_added[g] += 1
        if flats:
            maxima = _norms(list(flats.values())).to("cpu", non_blocking=True)
            event = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
            self.unchecked = list(flats.items()), maxima, event

    def _check_last(self) -> None:
        """On a GPU, take back what the last `add` should not have added: the addends that outgrew their grids.

        The host reads the largest elements only here, when the next piece's passes are queued, so that the GPU has work
        while the host waits. Integers are subtracted, so nothing is left of what is taken back.
        """
        if self.unchecked is None:
            return
        (unchecked, maxima, event), self.unchecked = self.unchecked, None
        if event is not None:
            event.synchronize()
        for (g, flat), largest in zip(unchecked, maxima.tolist(), strict=True):
            if not largest < self._limit(g):  # also if it is nan
                self.parts[g].sub_(self._rounded(flat, g))
                self.num_added[g] -= 1
                self._put_aside(g, flat)

    def _put_aside(self, g: int, flat: Tensor) -> None:
        """Keep an addend that outgrew its grid on the CPU, which has more memory than the GPU."""
        self.outgrown.append((g, flat.to("cpu", copy=True)))

    def _limit(self, g: int) -> float:
        """Return the upper limit of a group's elements; 0 if it has no grid yet."""
        grid_exponent = self.grid_exponents[g]
        return 0.0 if grid_exponent is None else 2.0 ** (grid_exponent + ADDEND_BITS)

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
        all_reduce(self.pack(alone=all_reduce is reduce_alone), "sum")
        sums, maxima = self.unpack(all_reduce, divisor)
        self.update_grids(maxima)
        return sums

    def pack(self, alone: bool = False) -> Tensor:
        """Do the first half of `total`: return the int64 tensor to sum in place over all processes.

        Add nothing after this.

        Args:
            alone: whether this is the only process. The host then knows the counts, so a GPU need not get them.
        """
        self._check_last()
        for g in self.local_groups:
            if not self.num_added[g]:
                self.parts[g].zero_()
        counts = [*self.num_added, len(self.outgrown), *self.present]
        self.counts_alone = counts if alone else None
        if alone:
            return self.message
        self.counts.copy_(torch.tensor(counts))
        if self.checks_messages:
            self.checks.copy_(_checksums([*self.parts, self.counts]))
        return self.message

    def unpack(self, all_reduce: AllReduce, divisor: float) -> tuple[list[Tensor], list[float]]:
        """Do the second half of `total`, after the result of `pack` is summed over all processes.

        Args:
            all_reduce: see `total`.
            divisor: see `total`.

        Returns:
            The sums, and the largest elements of the local groups, which `update_grids` takes.

        Raises:
            CorruptMessage: a message was damaged. Only the processes that received it damaged raise this.
        """
        if self.checks_messages and self.counts_alone is None:
            self._check([*self.parts, self.counts], self.checks, range(len(self.groups)))
        counts = self.counts.tolist() if self.counts_alone is None else self.counts_alone
        groups = len(self.groups)
        self.num_added, outgrown = counts[:groups], counts[groups]
        self.present = [count > 0 for count in counts[groups + 1 :]]
        outgrown_sums, broken = self._outgrown_total(all_reduce) if outgrown else ({}, set())
        results = {} if self.in_chunks else self._results_together(outgrown_sums.keys(), divisor)
        flats = [
            results[g] if g in results else self._result(g, outgrown_sums.get(g), divisor) for g in self.local_groups
        ]
        maxima = [largest * divisor for largest in _largest(flats, self.in_chunks)]
        sums = self._shaped(flats)
        self.broken = broken
        for index in broken:
            if index in sums:
                sums[index].fill_(math.nan)
        return [sums.get(index, like) for index, like in enumerate(self.like)], maxima

    def update_grids(self, maxima: Sequence[float]) -> None:
        """Choose the grids of later sums from `maxima`, the largest elements of the sum just finished.

        They are ignored if they are those of other groups.
        """
        if len(maxima) != len(self.local_groups):
            return
        for g, largest in zip(self.local_groups, maxima, strict=True):
            self.exponents[g] = self._next(self.exponents[g], largest)

    def _check(self, parts: Sequence[Tensor], checksums: Tensor, groups: Sequence[int]) -> None:
        """Compare the parts of a received message with its checksums.

        Args:
            parts: first one part for each of `groups`, then others.
            checksums: the received checksums, one for each part.
            groups: indices of the groups, for the error message.

        Raises:
            CorruptMessage: a part does not match.
        """
        if wrong := (_checksums(parts) != checksums).nonzero().flatten().tolist():
            tensors = [index for part in wrong if part < len(groups) for index in self.groups[groups[part]]]
            of = f" of {self.names[tensors[0]]} to {self.names[tensors[-1]]}" if self.names and tensors else ""
            raise CorruptMessage(
                f"step {self.step + 1}: the sums{of} do not match what the ranks sent; none was applied"
            )

    # --- one group of tensors ---

    def _next(self, old: int | None, largest: float) -> int | None:
        """Return the exponent of a group's next sum, from the last exponent and the last sum's largest element.

        If the sum was zero, its elements may be smaller than the grid, so the exponent is lowered.
        """
        least = LOWEST if self.floor is None else self.floor
        if largest:
            return min(max(math.frexp(largest)[1], least), HIGHEST)
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
        for g, flat in zip(self.local_groups, flats, strict=True):
            sizes = [self.like[index].numel() for index in self.groups[g]]
            for index, part in zip(self.groups[g], flat.split(sizes), strict=True):
                shape, strides = self.like[index].shape, self.like[index].stride()
                dense = self.dense[index]
                views[index] = part.as_strided(shape, strides, part.storage_offset()) if dense else part.view(shape)
        return views

    def _rounded(self, flat: Tensor, g: int) -> Tensor:
        """Return the elements of an addend rounded to its group's grid, as int64 with the constant's bits."""
        # `double` may return the addend itself, so don't add in place
        return torch.add(flat.double(), _constant(self.grid_exponents[g])).view(torch.int64)

    def _round(self, flat: Tensor, g: int, units: Tensor, first: bool) -> bool:
        """Round the elements, on a CPU, and add them to `units`, each with the constant's bits.

        The first addend overwrites the units. numpy does the same IEEE additions as torch in half of the time.

        Args:
            flat: the addend.
            g: index of the group.
            units: int64, as many as the addend has elements.
            first: whether this is the first addend of the units.

        Returns:
            Whether the addend fits the grid. If not, nothing was added; but the units are undefined if they had no
            addend before.
        """
        limit = self._limit(g)
        if not limit:
            return False
        values, sums, scratch = _array(flat), units.numpy(), self.scratch.numpy()
        constant = _constant(self.grid_exponents[g])

        def add_constant(start: int, into: np.ndarray) -> np.ndarray:
            np.copyto(into, values[start : start + CHUNK])  # np.add would convert in smaller parts, which is slower
            into += constant
            return into.view(np.int64)

        for start in range(0, len(values), CHUNK):
            part, into = values[start : start + CHUNK], sums[start : start + CHUNK]
            largest = max(-float(np.minimum.reduce(part)), float(np.maximum.reduce(part)))
            if not largest < limit:  # also true if the part has a nan. Subtract the chunks that were added before it
                for before in range(0, 0 if first else start, CHUNK):
                    sums[before : before + CHUNK] -= add_constant(before, scratch)
                return False
            if first:
                add_constant(start, into.view(np.float64))
            else:
                into += add_constant(start, scratch[: len(part)])
        return True

    def _together(self, groups: Iterable[int]) -> Iterator[list[int]]:
        """Yield some groups in lists of at most TOGETHER elements, or of one group."""
        batch: list[int] = []
        elements = 0
        for g in groups:
            if batch and elements + self.sizes[g] > TOGETHER:
                yield batch
                batch, elements = [], 0
            batch.append(g)
            elements += self.sizes[g]
        if batch:
            yield batch

    def _result(self, g: int, outgrown_sum: Tensor | None, divisor: float) -> Tensor:
        """Return the sum of a local group as floats: its units and what outgrew its grid, divided by `divisor`."""
        constants, scale = self._added_constants(g), 2.0 ** (self.grid_exponents[g] or 0)
        result = torch.empty(self.sizes[g], dtype=self.like[self.groups[g][0]].dtype, device=self.device)
        chunk = CHUNK if self.in_chunks else max(1, len(result))
        for start, units in zip(range(0, len(result), chunk), self.parts[g].split(chunk), strict=False):
            part = result[start : start + chunk]
            units.sub_(constants)
            exact = self.scratch[: len(part)].copy_(units) if self.in_chunks else units.double()
            if outgrown_sum is None:
                part.copy_(exact.div_(divisor / scale))
            else:
                part.copy_(exact.mul_(scale).add_(outgrown_sum[start : start + chunk]).div_(divisor))
        return result

    def _results_together(self, outgrown: Container[int], divisor: float) -> dict[int, Tensor]:
        """Return what `_result` returns for the groups that are not in `outgrown`, on a GPU: in few kernels."""
        results: dict[int, Tensor] = {}
        for groups in self._together(g for g in self.local_groups if g not in outgrown):
            units = [self.parts[g] for g in groups]
            torch._foreach_sub_(units, [self._added_constants(g) for g in groups])
            exact = [torch.empty_like(each, dtype=torch.float64) for each in units]
            torch._foreach_copy_(exact, units)
            torch._foreach_div_(exact, [divisor / 2.0 ** (self.grid_exponents[g] or 0) for g in groups])
            kinds = [self.like[self.groups[g][0]].dtype for g in groups]
            sums = [torch.empty_like(each, dtype=kind) for each, kind in zip(units, kinds, strict=True)]
            torch._foreach_copy_(sums, exact)
            results.update(zip(groups, sums, strict=True))
        return results

    def _added_constants(self, g: int) -> int:
        """Return the sum of the bits of a group's constants that were added, wrapped as int64 arithmetic does."""
        constants = self.num_added[g] * _bits(_constant(self.grid_exponents[g]))
        return (constants + 2**63) % 2**64 - 2**63

    # --- addends that outgrew their grids ---

    def _outgrown_total(self, all_reduce: AllReduce) -> tuple[dict[int, Tensor], set[int]]:
        """Sum the addends that outgrew their grids, on a grid for the largest exponent over all processes.

        This happens in the first step of a run and is rare afterwards.

        Returns:
            The sums by group, and the indices of the tensors that had an addend with elements that are not finite.
        """
        agreed, broken, agreement = self._agree_on_grids(all_reduce)
        units = {g: self._outgrown_units(g, agreed[g], self.sizes[g]) for g in self.local_groups if g in agreed}
        if units:
            # The last part shows whether `agreement` was damaged on its way: each process adds (sum of `agreement`, 1).
            # If all have received the same, the total is (processes * sum, processes).
            parts = [*units.values(), torch.stack([agreement.sum(), torch.ones_like(agreement[0])])]
            flat = torch.cat([*parts, _checksums(parts)])
            all_reduce(flat, "sum")
            *parts, agreement_check, checks = flat.split([*map(len, parts), len(parts)])
            consistent = torch.equal(agreement_check[0], agreement_check[1] * agreement.sum())
            # inverted checksums match nothing, so `_check` raises
            self._check([*parts, agreement_check], checks if consistent else ~checks, list(units))
            units = dict(zip(units, parts, strict=True))
        return {g: part.double().mul_(2.0 ** agreed[g]) for g, part in units.items()}, broken

    def _agree_on_grids(self, all_reduce: AllReduce) -> tuple[dict[int, int], set[int], Tensor]:
        """Choose the grids of the addends that outgrew theirs. In them, replace elements that are not finite by 0.

        Returns:
            The exponents of the grids by group, the indices of the tensors with elements that are not finite, and the
            tensor from which both follow. All are the same on all processes.
        """
        exponents = torch.full((len(self.groups),), NO_EXPONENT, dtype=torch.int64)
        broken = torch.zeros(len(self.like), dtype=torch.int64)
        for g, value in self.outgrown:
            group = self.groups[g]
            # the addend of a single tensor may be padded
            parts = value.split([self.like[index].numel() for index in group]) if len(group) > 1 else [value]
            for index, part, largest in zip(group, parts, maxima := _largest(parts, True), strict=True):
                if not largest < 2.0**HIGHEST:  # nan too
                    broken[index] = 1
                    part.zero_()
            largest = max(each for each in [0.0, *maxima] if each < 2.0**HIGHEST)
            if largest:
                exponents[g] = max(int(exponents[g]), math.frexp(largest)[1])
        agreement = torch.cat([exponents, broken]).to(self.device)
        all_reduce(agreement, "max")
        exponents, broken = agreement.cpu().split([len(self.groups), len(self.like)])
        # 2 bits instead of HEAD, 1 of them spare: these are the exponents of the addends themselves, so nothing grows.
        agreed = {g: e + 2 - BITS for g, e in enumerate(exponents.tolist()) if e != NO_EXPONENT}
        return agreed, {index for index, bad in enumerate(broken.tolist()) if bad}, agreement

    def _outgrown_units(self, g: int, grid_exponent: int, size: int) -> Tensor:
        """Return the sum of this process's addends that outgrew the grid of a group, as multiples of another grid."""
        units, constant = torch.zeros(size, dtype=torch.int64, device=self.device), _constant(grid_exponent)
        for other, value in self.outgrown:
            if other == g:
                units += (value.to(self.device).double() + constant).view(torch.int64) - _bits(constant)
        return units


class CheckedSum(ExactSum):
    """An exact sum that notices a message damaged on its way.

    Each message carries checksums, the sums of its parts mod 2**64. They are linear, so the checksums of the result
    must equal the summed checksums.
    """

    checks_messages = True


def _largest(flats: Sequence[Tensor], on_cpu: bool) -> list[float]:
    """Return the largest absolute value of each tensor; nan if the tensor has one."""
    if not flats:
        return []
    if on_cpu:  # numpy takes half of the time and propagates nan as torch does
        return [max(-float(each.min(initial=0)), float(each.max(initial=0))) for each in map(_array, flats)]
    return _norms(flats).tolist()


def _array(tensor: Tensor) -> np.ndarray:
    """Return a tensor's elements for numpy, which has no bfloat16."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _norms(flats: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of each tensor as float64 [n], with few kernels for all of them together."""
    norms = torch._foreach_norm([flat if len(flat) else flat.new_zeros(1) for flat in flats], math.inf)
    return torch.stack(norms).double()


def _checksums(parts: Sequence[Tensor]) -> Tensor:
    """Return the checksum of each part: its sum mod 2**64."""
    return torch.stack([part.sum() for part in parts])


def _constant(grid_exponent: int | None) -> float:
    """Return the float64 whose addition rounds to a multiple of 2**grid_exponent; of 2**0 if there is no grid yet."""
    return 1.5 * 2.0 ** (52 + (grid_exponent or 0))


def _bits(constant: float) -> int:
    """Return the bits of a float64, read as an int64."""
    return int(np.float64(constant).view(np.int64))


def _group(like: Sequence[Tensor], segment_ids: Sequence[int]) -> list[list[int]]:
    """Return groups of tensor indices: small neighbours of one dtype and segment together, large tensors alone."""
    groups: list[list[int]] = []
    free = -1  # elements that fit into the last group; there is none yet
    for index, tensor in enumerate(like):
        size = tensor.numel()
        if size <= free and (tensor.dtype, segment_ids[index]) == (like[index - 1].dtype, segment_ids[index - 1]):
            groups[-1].append(index)
            free -= size
        else:
            groups.append([index])
            free = SMALL - size
    return groups


def dense(tensor: Tensor) -> bool:
    """Check whether a tensor's elements fill their memory without gaps, so that they can be read in memory order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
