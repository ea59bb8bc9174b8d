"""Collect the folds of cross-validations, check that they belong together, and score them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from operator import mul
from statistics import fmean, stdev
from typing import Any

from lockstep.errors import UserError
from lockstep.programs.comparison.facts import differing_values, show
from lockstep.programs.comparison.runs import Group, Run, belongs_to_experiment
from lockstep.text import join_names, plural

POOLED = ("acc", "loss")  # means over samples, which can be pooled
TOGETHER = "the folds of a cross-validation must share all settings but data.fold"


@dataclass(frozen=True)
class CrossValidation:
    """The runs of a group with the same seed: one for each fold.

    Attributes:
        name: what sets it apart from others in the comparison.
        folds: the number of folds.
        runs: all runs, in the order of their folds.
    """

    name: str
    folds: int
    runs: list[Run]

    @property
    def completed(self) -> list[Run]:
        return [run for run in self.runs if run.completed]

    @property
    def present(self) -> set[int]:
        """The folds that have a run, completed or not."""
        return {run.config["data.fold"] for run in self.runs}

    @property
    def missing(self) -> list[int]:
        """The folds without a completed run."""
        return sorted(set(range(self.folds)) - {run.config["data.fold"] for run in self.completed})

    @property
    def sizes(self) -> list[int]:
        """The number of samples that each completed run has validated; empty if a run did not record it."""
        sizes = [int(run.summary.get("samples.val") or 0) for run in self.completed]
        return sizes if all(sizes) else []

    def row(self, metric: str) -> dict[str, Any]:
        """Return its row of the table, by column; `metric` is the name of a metric without `val/`.

        The out-of-fold score takes the samples of all folds as one set: each fold's mean counts by its samples.
        """
        done, sizes = len(self.completed), self.sizes
        row: dict[str, Any] = {"": self.name, "folds": done if done == self.folds else f"{done} of {self.folds}"}
        for name in (metric, "loss"):
            scores = [run.summary.get(f"metrics.val/{name}") for run in self.completed]
            values = [] if None in scores else [float(score) for score in scores if score is not None]
            pooled = sum(map(mul, values, sizes)) / sum(sizes) if values and sizes and not self.missing else None
            row |= {f"val {name}": fmean(values) if values else None}
            row |= {f"{name} +-": stdev(values) if len(values) > 1 else None}
            row |= {f"out-of-fold {name}": pooled} if name in POOLED else {}
        return row


def cross_validations(groups: Sequence[Group]) -> list[CrossValidation]:
    """Return the cross-validations among groups of runs.

    Raises:
        UserError: folds do not belong together: they are of different splits or settings, or a fold is there twice.
    """
    runs = [run for group in groups for run in _runs_with_folds(group)]
    for key in ("data.folds", "data.split_seed"):
        values: dict[str, Run] = {}
        for run in runs:
            values.setdefault(show(run.config.get(key)), run)
        if len(values) > 1:
            (one, first), (other, second) = list(values.items())[:2]
            raise UserError(
                f"{first.folder} has {key}={one}, {second.folder} has {other}: they are folds of different splits; "
                "compare one split at a time"
            )
    every = []
    for group in groups:
        by_seed: dict[str, list[Run]] = {}
        for run in _runs_with_folds(group):
            by_seed.setdefault(show(run.config.get("seed")), []).append(run)
        for seed, members in sorted(by_seed.items()):
            name = group.label + f", seed={seed}" * (len(by_seed) > 1)
            members.sort(key=lambda run: int(run.config["data.fold"]))
            every.append(CrossValidation(name, int(members[0].config["data.folds"]), members))
    for each in every:
        _check_complete_runs(each)
    for first_set, second_set in combinations([each for each in every if len(each.present) < each.folds], 2):
        if not first_set.present & second_set.present:
            raise UserError(_difference(first_set.runs[0], second_set.runs[0]))
    return every


def _runs_with_folds(group: Group) -> list[Run]:
    return [run for run in group.runs if isinstance(run.config.get("data.fold"), int)]


def _check_complete_runs(each: CrossValidation) -> None:
    """Check that no fold is there twice, and that all folds are of the same samples."""
    for run, later in pairwise(each.completed):
        if run.config["data.fold"] == later.config["data.fold"]:
            raise UserError(
                f"{run.folder} and {later.folder} are both fold {run.config['data.fold']}: name the folders of one "
                "cross-validation"
            )
    totals: dict[int, Run] = {}
    for run in each.completed if each.sizes else ():
        totals.setdefault(run.summary["samples.train"] + run.summary["samples.val"], run)
    if len(totals) > 1:
        (one, first), (other, second) = list(totals.items())[:2]
        raise UserError(
            f"{first.folder} is a fold of {plural(one, 'sample')}, {second.folder} of {other}: the folds of a "
            "cross-validation must be of the same data"
        )


def _difference(one: Run, other: Run) -> str:
    """Return why two runs are not folds of one cross-validation."""
    shown = [
        f"{key} ({show(values[0])}, {show(values[1])})"
        for key, values in differing_values(one.config, other.config).items()
        if key == "seed" or belongs_to_experiment(key, one.config)
    ]
    folds = [run.config["data.fold"] for run in (one, other)]
    return (
        f"{one.folder} (fold {folds[0]}) and {other.folder} (fold {folds[1]}) differ in {join_names(shown[:3])}: "
        f"{TOGETHER}"
    )
