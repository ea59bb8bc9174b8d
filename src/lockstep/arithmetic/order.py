"""The samples of each piece: a pure function of (seed, epoch, step), without state.

A random number is a hash of its keys (a seed, an epoch, a sample), so it does not depend on the layout, the number of
workers or a resume. The hash is SplitMix64's finaliser (Steele, Lea and Flood, Fast splittable pseudorandom number
generators, 2014). It uses integer arithmetic only, so no release of a library can change it.
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
    """Return a 64-bit hash of the keys, which depends on their order.

    Args:
        keys: integers, or integer arrays that broadcast against each other.

    Returns:
        An int below 2**64; if a key is an array, a uint64 array of the broadcast shape.
    """
    state: Any = 0
    for key in keys:
        number = int(key) & _MASK if isinstance(key, (int, np.integer)) else key.astype(np.uint64)
        state = ((state ^ number) * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state = state ^ (state >> 31)
    return state


def training_step_seed(seed: int, step: int, piece: int) -> int:
    """Return the 63-bit seed of a piece's forward pass (dropout), a function of (seed, step, piece)."""
    return int(hash64(seed, 0xD409, step, piece) >> 1)


def preparation_seed(seed: int, step: int, piece: int) -> int:
    """Return the 63-bit seed of what is done to a piece's batch before its forward pass (mixup)."""
    return int(hash64(seed, 0xBA7C4, step, piece) >> 1)


def hooks_seed(seed: int, place: int, number: int) -> int:
    """Return the 63-bit seed of hooks outside of pieces, a function of (seed, which hooks, number of step or epoch)."""
    return int(hash64(seed, 0x400C5, place, number) >> 1)


def evaluation_seed(seed: int, sample: int) -> int:
    """Return the 63-bit seed of an evaluation's batch, a function of (seed, number of its first sample)."""
    return int(hash64(seed, 0xE7A1, sample) >> 1)


def border(samples: int, pieces: int, piece: int) -> int:
    """Return where a part begins if `samples` neighbouring samples are cut into `pieces` parts.

    The last part ends at the border of `piece=pieces`. The sizes differ by at most one. With fewer samples than pieces,
    the empty parts are spread out, so that few devices get no sample.
    """
    return piece * samples // pieces


def cuts(samples: int, pieces: int) -> list[int]:
    """Return the `pieces + 1` borders of all parts; see `border`."""
    return [border(samples, pieces, piece) for piece in range(pieces + 1)]


@dataclass(frozen=True, eq=False)
class DataOrder:
    """The order of a training set of `samples` samples, in steps and pieces of the layout's size.

    Attributes:
        samples: samples of the training set.
        layout: gives the batch size and the pieces.
        seed: the run's seed.
        labels: for balanced sampling, the class of each sample, int64 [samples]. An epoch then has equally many samples
            of each class: a part of a large class, other samples in each epoch, and a small class several times.
        weights: for weighted sampling, the weight of each sample, finite and not negative, float64 [samples]. Each
            sample of an epoch is then drawn from all samples, with a probability proportional to its weight.
        shuffle: whether each epoch has another order; if not, it is that of the data set.
        drop_last: whether a short last step is left out.
        most: an epoch has only so many of the first samples of its order; None: all.
    """

    samples: int
    layout: Layout
    seed: int
    labels: NDArray[np.int64] | None = field(default=None, repr=False)
    weights: NDArray[np.float64] | None = field(default=None, repr=False)
    shuffle: bool = True
    drop_last: bool = False
    most: int | None = None

    @property
    def samples_per_epoch(self) -> int:
        """Samples of an epoch; a sampler may give other numbers of them than the training set has."""
        return self.samples if self.most is None else min(self.most, self.samples)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch. The last one may be short, unless `drop_last` leaves it out."""
        full, rest = divmod(self.samples_per_epoch, self.layout.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def encoded_ids(self, epoch: int) -> NDArray[np.int64]:
        """Return the samples of an epoch in order, int64 [samples].

        An element is `id + samples * n`, where `n` is how often the epoch has used the sample `id` before. Without
        labels and weights an epoch uses each sample once, so the elements are the ids.
        """
        return _encoded_ids(self, epoch)

    def position(self, global_step: int) -> tuple[int, int]:
        """Return `(epoch, step of the epoch)` after `global_step` optimizer steps."""
        return divmod(global_step, self.steps_per_epoch)

    def step(self, epoch: int, index: int) -> NDArray[np.int64]:
        """Return the sample ids of step `index` of an epoch, in order."""
        size = self.layout.batch_size
        return self.encoded_ids(epoch)[index * size : (index + 1) * size] % self.samples

    def pieces(self, epoch: int, index: int) -> list[NDArray[np.int64]]:
        """Return the part of `encoded_ids` of each piece of step `index`.

        Some parts are empty if a short last step has fewer samples than pieces.
        """
        return [self.piece(epoch, index, piece) for piece in range(self.layout.pieces)]

    def piece(self, epoch: int, index: int, piece: int) -> NDArray[np.int64]:
        """Return the part of `encoded_ids` of one piece of step `index`."""
        start, size = index * self.layout.batch_size, self.step_size(index)
        first, stop = (start + border(size, self.layout.pieces, each) for each in (piece, piece + 1))
        return self.encoded_ids(epoch)[first:stop]

    def step_size(self, index: int) -> int:
        """Return the number of samples of step `index` of any epoch."""
        return max(0, min(self.layout.batch_size, self.samples_per_epoch - index * self.layout.batch_size))

    def piece_sizes(self, index: int) -> list[int]:
        """Return the number of samples of each piece of step `index` of any epoch."""
        return [stop - start for start, stop in pairwise(cuts(self.step_size(index), self.layout.pieces))]


@lru_cache(maxsize=2)
def _encoded_ids(order: DataOrder, epoch: int) -> NDArray[np.int64]:
    if order.weights is not None:
        drawn = _drawn_ids(order, epoch, order.weights)
        return order_of_uses(drawn, order.samples)
    if not order.shuffle:
        return np.arange(order.samples)
    shuffled = np.argsort(hash64(order.seed, 0x04DE4, epoch, np.arange(order.samples)), kind="stable")
    if order.labels is None:
        return shuffled
    by_class = shuffled[np.argsort(order.labels[shuffled], kind="stable")]  # per class, samples in the epoch's order
    _, starts, counts = np.unique(order.labels[by_class], return_index=True, return_counts=True)
    turn, number = np.divmod(shuffled, len(counts))  # class `number` in random order, each class equally often
    number = (number + epoch) % len(counts)  # with a remainder, other classes get one more sample in each epoch
    repeats, member = np.divmod(turn, counts[number])
    return by_class[starts[number] + member] + order.samples * repeats


def _drawn_ids(order: DataOrder, epoch: int, weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Draw the ids of an epoch's samples by weight, with replacement, int64 [samples]."""
    borders = np.cumsum(weights / weights.max())  # added one after the other, so all machines get the same bits
    uniform = (hash64(order.seed, 0x3E164, epoch, np.arange(order.samples)) >> 11) * 2.0**-53  # in [0, 1)
    # The first border above the number: a sample with weight 0 has the border of the one before, and is never drawn.
    return np.searchsorted(borders, uniform * borders[-1], side="right")


def order_of_uses(ids: NDArray[np.int64], samples: int) -> NDArray[np.int64]:
    """Return drawn ids as `DataOrder.encoded_ids` has them, of a training set of `samples` samples."""
    return ids + samples * _earlier_uses(ids)


def _earlier_uses(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each element how often it occurs before its place, int64 [n]."""
    by_id = np.argsort(ids, kind="stable")
    _, starts, counts = np.unique(ids[by_id], return_index=True, return_counts=True)
    uses = np.empty_like(ids)
    uses[by_id] = np.arange(len(ids)) - np.repeat(starts, counts)
    return uses
