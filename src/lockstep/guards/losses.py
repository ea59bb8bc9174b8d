"""Numbers of some samples of a piece: whether their loss is a mean, a sum, or depends on other samples."""

import math
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

MIN_T = 4.0  # the t statistic of a growth that is no noise
MIN_RATIO, MAX_RATIO = 1.6, 5.0  # of the growth from two parts to four and the growth from one to two
MIN_GROWTH = 0.25  # from one part of the piece to two, as a share of the loss; below it, the loss may be noise
MIN_DIFFERENCE = 1e-4  # of a loss and the mean of its parts, as a share of them; in 16 bits HALF
HALF = 0.03


class WeightedMeans(TorchFunctionMode):
    """Inside the `with` block, notices torch's losses that are a mean by class weights.

    Samples may lack a rare class, so that their losses do not show it.

    Attributes:
        name: what is noticed, or "".
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch. Note the weights of a weighted mean."""
        kwargs = kwargs or {}
        if function in (F.cross_entropy, F.nll_loss):
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            if weight is not None and kwargs.get("reduction", "mean") == "mean" and bool((weight != weight[0]).any()):
                self.name = f"is {function.__name__}(weight=...), which divides by the weights"
        return function(*args, **kwargs)


class Losses:
    """The losses of some samples of a piece, each computed once.

    Args:
        compute: returns the loss of samples, in this order and so often, and the weight beside it. Its third argument,
            if not None, is the piece whose random numbers it has.
        share: the smallest difference that is no rounding, as a share of the losses.

    Attributes:
        known: by samples, the loss and the weight beside it. Without a weight it is the number of samples.
        weighted: whether `training_step` returns weights.
    """

    def __init__(
        self, compute: Callable[[range, int, int | None], tuple[float, float | None]], share: float = MIN_DIFFERENCE
    ) -> None:
        self.compute, self._share = compute, share
        self.known: dict[range, tuple[float, float]] = {}
        self.weighted = False
        self._smallest = 0.0

    def of(self, rows: range) -> tuple[float, float]:
        """Return the loss of samples, and its weight."""
        if rows not in self.known:
            loss, weight = self.compute(rows, 1, None)
            self.weighted = weight is not None
            self.known[rows] = (loss if weight != 0 else 0.0), float(len(rows) if weight is None else weight)
        return self.known[rows]

    def are_almost_equal(self, blocks: Sequence[range]) -> bool:
        """Check whether samples have almost the same loss, so that each mean of them is the same."""
        losses = [self.of(rows)[0] for rows in blocks]
        return max(losses) - min(losses) <= 10 * MIN_DIFFERENCE * max(map(abs, losses))

    def are_random(self, rows: range, piece: int) -> bool:
        """Check whether a loss depends on random numbers: it has others with those of another `piece`."""
        return abs(self.of(rows)[0] - self.compute(rows, 1, piece)[0]) > self._smallest

    def differ_from_mean(self, blocks: Sequence[range], whole: range) -> bool:
        """Check whether the loss of some samples is not the mean of the losses of their parts."""
        loss, weight = self.of(whole)
        if not (math.isfinite(loss) and weight):
            return False
        expected = sum(self.of(rows)[0] * self.of(rows)[1] for rows in blocks) / weight
        rounding = abs(self.of(whole)[0] - self.of(whole[::-1])[0])  # which another order of the samples shows
        scale = max(abs(loss) for loss, _ in self.known.values() if math.isfinite(loss))
        self._smallest = max(self._share * scale, 20 * rounding, 1e-12)
        return not abs(loss - expected) <= self._smallest  # that of a part may be nan, a mean over nothing

    def follow_other_mean(self, borders: Sequence[int]) -> bool:
        """Check whether losses are those of a mean by unknown weights, which follow from those of neighbours.

        Such a mean of samples that are repeated is the same. Three neighbouring parts, together in pairs, give the
        weights; the loss of all three follows. If only some parts have no finite loss, their weights are 0.
        """
        whole = range(borders[0], borders[-1])
        finite = [math.isfinite(self.of(range(*part))[0]) for part in pairwise(borders)]
        if any(finite) and not all(finite):
            return True
        if abs(self.of(whole)[0] - self.compute(whole, 2, None)[0]) > self._smallest:
            return False
        answers = [self._follow(*cuts) for cuts in combinations(borders, 4)]
        known = [answer for answer in answers if answer is not None]
        return len(borders) < 4 or sum(known) > 0.8 * len(known)

    def _follow(self, start: int, first: int, second: int, stop: int) -> bool | None:
        """Check the losses of three neighbouring parts: whether they are those of one mean; None if they can't say."""
        parts = range(start, first), range(first, second), range(second, stop), range(start, second), range(first, stop)
        a, b, c, ab, bc = (self.of(rows)[0] for rows in parts)
        abc, smallest = self.of(range(start, stop))[0], self._smallest
        if not min(abs(ab - b), abs(ab - a), abs(bc - b), abs(bc - c)) > 10 * smallest:  # also if one is nan
            return None
        weight_a, weight_c = (ab - b) / (a - ab), (bc - b) / (c - bc)  # that of b is 1
        if not (weight_a > 0 and weight_c > 0):
            return False
        expected = (weight_a * a + b + weight_c * c) / (weight_a + 1 + weight_c)
        # The differences of losses that are nearly equal say little about the weights.
        error = smallest * (1 + abs(a - abc) / abs(a - ab) + abs(c - abc) / abs(c - bc))
        return abs(expected - abc) <= error


def may_grow(losses: list[float]) -> bool:
    """Check whether `grows` may be true; it is false for most modules, which then need only one pass of each size."""
    one, two, four = losses
    return abs(two - one) > MIN_GROWTH / 2 * abs(one) and (four - two) * (two - one) > 0


def grows(losses: list[list[float]]) -> bool:
    """Check whether losses of 1, 2 and 4 equal parts grow with them, in proportion or faster, beside a constant.

    Args:
        losses: for each seed the three losses. The growth must be clear beside the noise between seeds.
    """
    one, two, four = np.array(losses).T
    first, second = two - one, four - two
    if not np.isfinite(losses).all() or abs(first.mean()) <= MIN_GROWTH * abs(one.mean()):
        return False
    if any(abs(growth.mean()) * len(losses) ** 0.5 < MIN_T * growth.std(ddof=1) for growth in (first, second)):
        return False
    # 2 for a sum over the samples, 4 for a sum over pairs of them
    return bool(MIN_RATIO <= second.mean() / first.mean() <= MAX_RATIO)
