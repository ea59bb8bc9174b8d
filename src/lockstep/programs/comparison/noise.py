"""Decide whether the difference of two groups of runs is larger than the noise, by Student's t.

Runs with the same seed and fold share initial weights, order of samples and augmentation, so they are compared in
pairs: an effect that a seed has on both runs of a pair does not count as noise. The folds of a cross-validation share
training samples, so their scores vary together, and the usual interval is too narrow. It is widened as Nadeau and
Bengio propose (Inference for the generalization error, 2003): if n differences have the variance s^2, the variance of
their mean is not s^2 / n but s^2 (1 / n + validation samples / training samples).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance
from typing import Any

from scipy.special import stdtrit

from lockstep.programs.comparison.runs import Group

LEVEL = 0.95  # confidence level of an interval
POWER = 0.8  # probability with which the recommended number of seeds finds a real difference
FALLBACK = ("val/loss",)  # scores to compare if a group has no values of the metric
MAX_FURTHER_SEEDS = 1000

Values = dict[tuple[Any, Any, int], float]  # (seed, fold, number of folds; 0: no folds) -> score


@dataclass(frozen=True)
class Difference:
    """The difference of the mean scores of two groups of runs. The names of its fields are keys of compare.json.

    Attributes:
        compared: the runs, as text: `5 pairs`, `5 and 4 runs`.
        mean: the second group's mean minus the first one's.
        margin: half the width of the interval at LEVEL.
        further: how many further seeds each group needs to find such a difference with the probability POWER, at most
            MAX_FURTHER_SEEDS; None: the interval excludes 0 already, or further seeds can't help, as with folds.
    """

    compared: str
    mean: float
    margin: float
    further: int | None

    @property
    def verdict(self) -> str:
        """The answer to the question whether the difference is larger than the noise."""
        if not self.margin:  # a small data set allows few scores: all differences can be equal by chance
            return "unclear: too few different scores" if self.mean else "no difference"
        return "yes" if abs(self.mean) > self.margin else "no"


def differences_from_first(groups: Sequence[Group], metric: str) -> list[tuple[Group, str, Difference]]:
    """Return the difference of each group from the first one in each score that two or more runs of both have.

    Args:
        groups: at least one group.
        metric: name of the metric to compare, without `val/`.
    """
    names = f"val/{metric}", f"test/{metric}"
    first, *others = groups
    differences = []
    for group in others:
        scores = [name for name in names if group.values(f"metrics.{name}")] or FALLBACK
        for name in scores:
            difference = compare(*(values_by_seed_and_fold(each, f"metrics.{name}") for each in (first, group)))
            if difference is not None:
                differences.append((group, name, difference))
    return differences


def values_by_seed_and_fold(group: Group, key: str) -> Values:
    """Return the values of a summary key for the completed runs that have it."""
    folds = group.runs[0].config.get("data.folds") or 0
    runs = [run for run in group.completed if run.summary.get(key) is not None]
    return {(*run.seed_and_fold, folds): float(run.summary[key]) for run in runs}


def compare(first: Values, second: Values) -> Difference | None:
    """Return the difference of two groups of values, `second` minus `first`; None if one has fewer than two values.

    The values are paired if more than half of the smaller group's seeds and folds are in the other group too.
    """
    smaller = min(len(first), len(second))
    if smaller < 2:
        return None
    folds = max(key[-1] for key in (*first, *second))
    shared = sorted(first.keys() & second.keys(), key=str)
    if len(shared) >= 2 and 2 * len(shared) > smaller:
        differences = [second[key] - first[key] for key in shared]
        variance_per_seed, runs, degrees_per_seed = variance(differences), len(differences), 1
        variance_of_mean, degrees = variance_per_seed * variance_factor(runs, folds), runs - 1.0
        compared, mean = f"{runs} pairs", fmean(differences)
    else:
        variances, sizes = [variance(values.values()) for values in (first, second)], (len(first), len(second))
        variance_per_seed, runs, degrees_per_seed = sum(variances), smaller, 2
        mean_variances = [each * variance_factor(size, folds) for each, size in zip(variances, sizes, strict=True)]
        variance_of_mean = sum(mean_variances)
        # Welch and Satterthwaite's degrees of freedom
        divisor = sum(each**2 / (size - 1) for each, size in zip(mean_variances, sizes, strict=True))
        degrees = variance_of_mean**2 / divisor if divisor else 1.0
        compared, mean = f"{sizes[0]} and {sizes[1]} runs", fmean(second.values()) - fmean(first.values())
    margin = student_quantile((1 + LEVEL) / 2, degrees) * math.sqrt(variance_of_mean)
    if abs(mean) > margin or not mean or folds:
        return Difference(compared, mean, margin, None)
    return Difference(compared, mean, margin, further_seeds(mean, variance_per_seed, runs, degrees_per_seed))


def variance_factor(runs: int, folds: int) -> float:
    """Return the variance of the mean of `runs` values, divided by the variance of one value.

    For folds it is the one of Nadeau and Bengio. Each fold has 1 / (folds - 1) as many validation as training samples.
    """
    return 1 / runs + (1 / (folds - 1) if folds else 0)


def further_seeds(mean: float, variance_per_seed: float, runs: int, degrees_per_seed: int) -> int:
    """Return how many further seeds find a difference of the size of `mean` with the probability POWER.

    The number is at most MAX_FURTHER_SEEDS.

    Args:
        mean: the difference so far.
        variance_per_seed: variance of the difference of two runs.
        runs: the number of seeds so far.
        degrees_per_seed: the degrees of freedom that a further seed adds: 1 for pairs, 2 for groups with different
            seeds.
    """
    normal_quantiles = sum(NormalDist().inv_cdf(p) for p in ((1 + LEVEL) / 2, POWER))
    number = max(runs + 1, math.ceil(variance_per_seed * (normal_quantiles / mean) ** 2))
    while number < MAX_FURTHER_SEEDS + runs:
        quantiles = sum(student_quantile(p, degrees_per_seed * (number - 1)) for p in ((1 + LEVEL) / 2, POWER))
        if quantiles * math.sqrt(variance_per_seed / number) <= abs(mean):
            break
        number += 1
    return min(number - runs, MAX_FURTHER_SEEDS)


def student_quantile(probability: float, degrees: float) -> float:
    """Return the quantile of Student's t distribution. The degrees of freedom are rounded down, but to at least 1."""
    return float(stdtrit(max(1, int(degrees)), probability))
