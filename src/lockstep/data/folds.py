"""The folds of a cross-validation: a pure function of a seed and the labels, the same on every layout and machine."""

from typing import Any

import numpy as np

from lockstep.arithmetic.order import hash64
from lockstep.data.datasets import Ids, Spec, labels_of
from lockstep.errors import UserError
from lockstep.text import plural


def assign_folds(labels: Ids, folds: int, seed: int) -> Ids:
    """Return the fold of each sample, int64 [n].

    The samples are sorted by class, and within a class by a hash of `seed` and their number. The folds take turns. So
    the sizes of two folds differ by at most one, in all and in each class.

    Args:
        labels: the class of each sample, int64 [n].
        folds: the number of folds.
        seed: seeds the hash.
    """
    by_class = np.lexsort((hash64(seed, 0xF01D, np.arange(len(labels))), labels))
    assigned = np.empty(len(labels), dtype=np.int64)
    assigned[by_class] = np.arange(len(labels)) % folds
    return assigned


def validation_fold(dataset: Any, spec: Spec, folds: int, fold: int, seed: int) -> tuple[Ids, str]:
    """Return the ids of the samples of a fold, sorted, and a line about it for the log.

    If the labels are unknown without making samples, the folds are chosen by the hash alone, and the line states it.

    Raises:
        UserError: a class has fewer samples than there are folds.
    """
    stratified = ", each class alike"
    try:
        labels = labels_of(dataset)
    except UserError:
        labels = np.zeros(len(dataset), dtype=np.int64)
        stratified = " by chance, since the data set has no attribute labels or targets with one class for each sample"
    classes, counts = np.unique(labels, return_counts=True)
    least = int(counts.argmin())
    if counts[least] < folds:
        label, count = int(classes[least]), int(counts[least])
        name = spec.classes[label] if 0 <= label < spec.num_classes else label
        right = f"use data.folds={count} or less" if count > 1 else "each class must have two at least"
        raise UserError(f"data.folds={folds}: the class {name} has {plural(count, 'training sample')}: {right}")
    ids = np.flatnonzero(assign_folds(labels, folds, seed) == fold)
    return ids, f"cross-validation: fold {fold} of {folds} (0 to {folds - 1}) is for validation{stratified}"
