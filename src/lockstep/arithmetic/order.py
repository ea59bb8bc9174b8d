"""Which samples a piece holds: a pure function of (seed, epoch, step), with no state and no hidden RNG.

Random numbers are hashes of what they belong to (a seed, an epoch, a sample), so neither layout, worker count nor
resume can move them. The hash is SplitMix64's finaliser (Steele, Lea and Flood, Fast splittable pseudorandom number
generators, 2014), written in integer arithmetic, which no release of a library may change.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.arithmetic.layout import Layout

_MASK = (1 << 64) - 1


def hash64(*keys: int | NDArray[np.integer]) -> Any:
    """A 64-bit hash of the keys in their order: an int, or where keys are arrays (they broadcast) uint64 elements."""
    state: Any = 0
    for key in keys:
        number = int(key) & _MASK if isinstance(key, (int, np.integer)) else key.astype(np.uint64)
        state = ((state ^ number) * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state = state ^ (state >> 31)
    return state


def uniform(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Hashes as uniform numbers in [0, 1): their upper 53 bits."""
    return (hashes >> 11).astype(np.float64) * 2.0**-53


def piece_seed(seed: int, step: int, piece: int) -> int:
    """The seed of what is random inside a piece (dropout): 63 bits, a function of (seed, step, piece)."""
    return int(hash64(seed, 0xD409, step, piece) >> 1)


def batch_seed(seed: int, step: int, piece: int) -> int:
    """As `piece_seed`, of what a module does to a piece's batch before it computes anything."""
    return int(hash64(seed, 0xBA7C4, step, piece) >> 1)


def cuts(samples: int, pieces: int) -> list[int]:
    """Where `samples` in a row are cut into `pieces` parts: `pieces + 1` positions, parts differ by one at most.

    With fewer samples than pieces the empty parts lie spread out, so that few devices go without a sample.
    """
    return [piece * samples // pieces for piece in range(pieces + 1)]


@dataclass(frozen=True, eq=False)
class DataOrder:
    """The order of a training set of `samples` samples, in steps and pieces of the layout's size.

    With the samples' `labels` [samples] an epoch, of the same length, has equally many of each class: of a large class
    a part, which changes from epoch to epoch, of a small one all, again and again.
    """

    samples: int
    layout: Layout
    seed: int
    labels: NDArray[np.int64] | None = field(default=None, repr=False)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; the last one holds what is left."""
        return -(-self.samples // self.layout.batch_size)

    def numbers(self, epoch: int) -> NDArray[np.int64]:
        """What the epoch takes one after the other: sample ids; with labels, `id + samples * how often before`."""
        return _numbers(self, epoch)

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        """The epoch's sample ids in their order: by their hash with (seed, epoch); with labels, some repeated."""
        return self.numbers(epoch) % self.samples

    def position(self, global_step: int) -> tuple[int, int]:
        """`(epoch, step of the epoch)` after `global_step` optimizer steps."""
        return divmod(global_step, self.steps_per_epoch)

    def step(self, epoch: int, index: int) -> NDArray[np.int64]:
        """The sample ids of step `index` of an epoch, in order."""
        size = self.layout.batch_size
        return self.numbers(epoch)[index * size : (index + 1) * size] % self.samples

    def pieces(self, epoch: int, index: int) -> list[NDArray[np.int64]]:
        """The numbers of each piece of a step; empty where a short last step has fewer samples than pieces."""
        start = index * self.layout.batch_size
        step_samples = self.numbers(epoch)[start : start + self.layout.batch_size]
        at = cuts(len(step_samples), self.layout.pieces)
        return [step_samples[start:stop] for start, stop in pairwise(at)]


@lru_cache(maxsize=2)
def _numbers(order: DataOrder, epoch: int) -> NDArray[np.int64]:
    shuffled = np.argsort(hash64(order.seed, 0x04DE4, epoch, np.arange(order.samples)), kind="stable")
    if order.labels is None:
        return shuffled
    by_class = shuffled[np.argsort(order.labels[shuffled], kind="stable")]  # each class's samples, in the epoch's order
    _, starts, counts = np.unique(order.labels[by_class], return_index=True, return_counts=True)
    turn, number = np.divmod(shuffled, len(counts))  # evenly over classes, in an order that has nothing to do with them
    number = (number + epoch) % len(counts)  # where classes do not divide the epoch, others get one more
    again, member = np.divmod(turn, counts[number])
    return by_class[starts[number] + member] + order.samples * again


def chunks(samples: int, size: int) -> list[tuple[int, int]]:
    """An evaluation set of `samples` in a row, cut into `(start, stop)` parts of `size`; the last may be short."""
    return [(start, min(start + size, samples)) for start in range(0, samples, size)]
