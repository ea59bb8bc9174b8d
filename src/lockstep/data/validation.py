"""Which samples are for validation: a share, or a fold of a cross-validation.

Both are a pure function of a seed and the labels, the same on every layout and machine.
"""

from typing import Any

import numpy as np
from torch.utils.data import Subset

from lockstep.arithmetic.order import hash64
from lockstep.data.datasets import Ids, Source, Spec, labels_of
from lockstep.errors import UserError
from lockstep.text import plural


def split_validation(
    source: Source, fraction: float, folding: tuple[int, int] | None, seed: int
) -> tuple[Any, Any, str]:
    """Return a source's training set, its validation set or None, and a line about the data for the log.

    Args:
        source: its own validation set is used if it has one.
        folding: the number of folds, and the one for validation; None: no folds.

    Raises:
        UserError: as of `hold_out` and `validation_fold`.
    """
    if source.val is not None:
        return source.train, source.val, source.about
    if folding is None:
        return *hold_out(source.train, fraction, seed, source.val_candidates), source.about
    val_ids, line = validation_fold(source.train, source.spec, *folding, seed)
    train, val = divide(source.train, val_ids, source.val_candidates)
    return train, val, "; ".join(filter(None, [source.about, line]))


def hold_out(dataset: Any, fraction: float, seed: int, val_candidates: Any = None) -> tuple[Any, Any]:
    """Split a data set into training and validation; both keep the order of samples.

    Args:
        fraction: share of the samples for validation: those whose hashes with `seed` are the smallest.
        seed: belongs to the data, not to the run, so that runs with other seeds use the same validation set.
        val_candidates: if `dataset` augments its samples itself, the same samples without augmentation.

    Returns:
        `(train, val)`; `val` is None if `fraction` is 0.

    Raises:
        UserError: no training sample would remain, or `val_candidates` has another length.
    """
    if not fraction:
        return dataset, None
    samples = len(dataset)
    hashes = hash64(seed, 0x5B117, np.arange(samples))  # all differ
    val_size = max(1, round(fraction * samples))
    if val_size >= samples:
        raise UserError(
            f"data.val_fraction={fraction:g} leaves no image for training, of {samples}: use a smaller share"
        )
    return divide(dataset, np.flatnonzero(hashes < np.partition(hashes, val_size)[val_size]), val_candidates)


def divide(dataset: Any, val_ids: Ids, val_candidates: Any = None) -> tuple[Any, Any]:
    """Return the training and the validation samples of a data set; both keep the order of samples.

    Args:
        val_ids: numbers of the samples for validation, sorted.
        val_candidates: as of `hold_out`.

    Raises:
        UserError: `val_candidates` has another length.
    """
    samples = len(dataset)
    if val_candidates is None:
        val_candidates = dataset
    if len(val_candidates) != samples:
        raise UserError(
            f"data: the Source's val_candidates has {len(val_candidates)} samples: it must have {samples}, as its train"
        )
    in_val = np.zeros(samples, dtype=bool)
    in_val[val_ids] = True
    train_ids = np.flatnonzero(~in_val)
    return Subset(dataset, train_ids), Subset(val_candidates, val_ids)  # type: ignore[arg-type]


def assign_folds(labels: Ids, folds: int, seed: int) -> Ids:
    """Return the fold of each sample, int64 [n].

    The samples are sorted by class, and within a class by a hash of `seed` and their number. The folds take turns. So
    the sizes of two folds differ by at most one, in all and in each class.

    Args:
        labels: the class of each sample, int64 [n].
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
