"""Decide whether the difference of two groups of runs is larger than the noise, by Student's t for pairs.

Runs with the same seed and fold share initial weights, order of samples and augmentation, so they are compared in
pairs: an effect that a seed has on both runs of a pair does not count as noise. The folds of a cross-validation share
training samples, so their scores vary together, and the usual interval is too narrow. It is widened as Nadeau and
Bengio propose (Inference for the generalization error, 2003): if n differences have the variance s^2, the variance of
their mean is not s^2 / n but s^2 (1 / n + validation samples / training samples).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any

from scipy.special import stdtrit

from lockstep.programs.comparison.runs import Group

LEVEL = 0.95  # confidence level of an interval
FALLBACK = ("val/loss",)  # scores to compare if a group has no values of the metric

Values = dict[tuple[Any, Any, int], float]  # (seed, fold, number of folds; 0: no folds) -> score


@dataclass(frozen=True)
class Difference:
    """The difference of the mean scores of two groups of runs. The names of its fields are keys of compare.json.

    Attributes:
        pairs: the number of pairs of runs with the same seed and fold.
        mean: the mean of the second run minus the first one.
        margin: half the width of the interval at LEVEL.
    """

    pairs: int
    mean: float
    margin: float

    @property
    def verdict(self) -> str:
        """The answer to the question whether the difference is larger than the noise."""
        if not self.margin:  # a small data set allows few scores: all differences can be equal by chance
            return "unclear: too few different scores" if self.mean else "no difference"
        return "yes" if abs(self.mean) > self.margin else "no"


def differences_from_first(groups: Sequence[Group], metric: str) -> list[tuple[Group, str, Difference]]:
    """Return the difference of each group from the first one in each score that two or more pairs of runs have.

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
    """Return the difference of two groups of values, `second` minus `first`; None if they have fewer than two pairs."""
    shared = sorted(first.keys() & second.keys(), key=str)
    if len(shared) < 2:
        return None
    differences = [second[key] - first[key] for key in shared]
    # Each fold has 1 / (folds - 1) as many validation as training samples.
    folds = shared[0][-1]
    factor = 1 / len(shared) + (1 / (folds - 1) if folds else 0)
    quantile = float(stdtrit(len(shared) - 1, (1 + LEVEL) / 2))
    return Difference(len(shared), fmean(differences), quantile * math.sqrt(variance(differences) * factor))
