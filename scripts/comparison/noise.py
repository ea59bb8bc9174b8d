"""Decide whether the difference of two groups of runs is larger than the noise, by Student's t.

Runs with the same seed and fold share initial weights, order of samples and augmentation, so they are compared in
pairs: what a seed does to both does not count as noise. The folds of a cross-validation share training samples, so
their scores vary together, and the usual interval is too narrow. It is widened as Nadeau and Bengio propose (Inference
for the generalization error, 2003): the variance of a mean of n differences is not s^2 / n but
s^2 (1 / n + validation samples / training samples).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, variance
from typing import Any

from comparison.runs import Group

LEVEL, POWER = 0.95, 0.8
OTHERWISE = ("val/loss",)  # of runs without such a metric
MOST = 1000  # further seeds; more are not counted
LARGE = 300  # degrees of freedom from which Student's t is taken as normal


@dataclass(frozen=True)
class Difference:
    """The difference of two means of runs.

    Attributes:
        compared: the runs, as text: `5 pairs`, `5 and 4 runs`.
        mean: the second group's mean minus the first one's.
        margin: half the width of the interval at LEVEL.
        further: how many further seeds of each would show such a difference with the probability POWER, at most MOST;
            None: none are needed, or further seeds can't help, as with folds.
    """

    compared: str
    mean: float
    margin: float
    further: int | None

    @property
    def verdict(self) -> str:
        """Whether the difference is larger than the noise."""
        if not self.margin:  # scores of a small set have few values, so this can happen by chance
            return "unclear: too few different scores" if self.mean else "no difference"
        return "yes" if abs(self.mean) > self.margin else "no"


def against_first(groups: Sequence[Group], metric: str) -> list[tuple[Group, str, Difference]]:
    """Return the difference of each group from the first one, for each score that both have for two runs or more.

    Args:
        groups: the groups.
        metric: name of the metric to compare, without `val/`.
    """
    wanted = f"val/{metric}", f"test/{metric}"
    first, *others = groups
    differences = []
    for group in others:
        scores = [name for name in wanted if group.values(f"metrics.{name}")] or OTHERWISE
        for name in scores:
            difference = compare(*(values_by_draw(each, f"metrics.{name}") for each in (first, group)))
            if difference is not None:
                differences.append((group, name, difference))
    return differences


def values_by_draw(group: Group, key: str) -> dict[tuple[Any, Any, int], float]:
    """Return the values of a summary key by seed, fold and number of folds (0: none)."""
    folds = group.runs[0].config.get("data.folds") or 0
    return {(*run.draw, folds): float(run.summary[key]) for run in group.completed if run.summary.get(key) is not None}


def compare(one: dict[tuple[Any, Any, int], float], other: dict[tuple[Any, Any, int], float]) -> Difference | None:
    """Return the difference of two groups of values; None if one has fewer than two.

    They are paired if most of the smaller group's seeds and folds are in the other one.
    """
    few = min(len(one), len(other))
    if few < 2:
        return None
    folds = max(draw[-1] for draw in (*one, *other))
    shared = sorted(one.keys() & other.keys(), key=str)
    if len(shared) >= 2 and 2 * len(shared) > few:
        pairs = [other[draw] - one[draw] for draw in shared]
        spread, degrees, runs, sides = variance(pairs), len(pairs) - 1.0, len(pairs), 1
        text, mean, square = f"{runs} pairs", fmean(pairs), spread * share(runs, folds)
    else:
        parts = [variance(values.values()) * share(len(values), folds) for values in (one, other)]
        sizes = len(one), len(other)
        square = sum(parts)
        below = sum(part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True))
        degrees = square**2 / below if below else 1.0  # Welch and Satterthwaite
        spread, runs, sides = sum(variance(values.values()) for values in (one, other)), few, 2
        text, mean = f"{sizes[0]} and {sizes[1]} runs", fmean(other.values()) - fmean(one.values())
    margin = student_quantile((1 + LEVEL) / 2, degrees) * math.sqrt(square)
    decided = abs(mean) > margin or not mean or folds
    return Difference(text, mean, margin, None if decided else further_seeds(mean, spread, runs, sides))


def share(runs: int, folds: int) -> float:
    """Return the part of the variance of one value that the mean of `runs` values has."""
    return 1 / runs + (1 / (folds - 1) if folds else 0)


def further_seeds(mean: float, spread: float, runs: int, sides: int) -> int:
    """Return how many further seeds show a difference like `mean` with the probability POWER, at most MOST.

    Args:
        mean: the difference so far.
        spread: the variance of the difference of one seed.
        runs: the number of seeds so far.
        sides: 1 for pairs, 2 for runs with other seeds.
    """
    normal = sum(NormalDist().inv_cdf(p) for p in ((1 + LEVEL) / 2, POWER))
    number = max(runs + 1, math.ceil(spread * (normal / mean) ** 2))
    while number < MOST + runs:
        quantiles = sum(student_quantile(p, sides * (number - 1)) for p in ((1 + LEVEL) / 2, POWER))
        if quantiles * math.sqrt(spread / number) <= abs(mean):
            break
        number += 1
    return min(number - runs, MOST)


def student_quantile(probability: float, degrees: float) -> float:
    """Return the quantile of Student's t distribution; degrees of freedom are rounded down, to 1 at least.

    Args:
        probability: above 0.5.
        degrees: degrees of freedom.
    """
    return _quantile(probability, max(1, int(degrees)))


@cache
def _quantile(probability: float, degrees: int) -> float:
    if degrees >= LARGE:
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, degrees) < 2 * probability - 1 else (low, middle)
    return high


def _inside(t: float, degrees: int) -> float:
    """Return the probability that |T| < t, by the finite sums of Abramowitz and Stegun (1964), 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
