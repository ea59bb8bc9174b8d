"""The check of labels for a model that classifies: each must be the number of a class."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from lockstep.data.datasets import ArrayDataset, Ids, fetch, innermost_dataset, labels_of
from lockstep.data.splits import Splits
from lockstep.errors import StepRefused, UserError

NAMES = {"train": "training", "val": "validation", "test": "test"}
KINDS = (torch.int64, torch.uint8)  # of labels with which torch's cross_entropy computes


class LabelCheck:
    """Check the labels of batches on the host, before a device gets them: an index out of range would stop a GPU.

    Args:
        dataset: the data set of a split.
        split: `train`, `val` or `test`.
        num_classes: number of classes.
    """

    def __init__(self, dataset: Any, split: str, num_classes: int) -> None:
        self.dataset, self.split, self.num_classes = dataset, split, num_classes
        # A collate_fn of the user's own may mix the samples of a training batch, with a share of each class as label.
        self.may_be_mixed = split == "train" and hasattr(innermost_dataset(dataset), "collate_fn")

    def __call__(self, batch: Any, ids: Any) -> None:
        """Check a batch of samples.

        Args:
            batch: what the data set returns, collated.
            ids: numbers of its samples in the split, [n].
        """
        y = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
        if not isinstance(y, Tensor) or not y.numel() or len(y) != len(ids):
            return
        if y.ndim == 1 and y.dtype in KINDS:
            wrong = (y < 0) | (y >= self.num_classes)
            if bool(wrong.any()):
                row = int(wrong.nonzero()[0])
                raise StepRefused(self.message(int(ids[row]), str(int(y[row])), ""))
        elif not (self.may_be_mixed and y.is_floating_point() and y.shape[1:] == (self.num_classes,)):
            raise StepRefused(self.message(int(ids[0]), *described(y[0])))

    def message(self, index: int, label: str, remedy: str) -> str:
        """Return the message about a label.

        Args:
            index: number of the sample in the split.
            label: the label as text.
            remedy: how a label is made from it; empty: unknown.
        """
        dataset: Any = self.dataset
        while type(dataset) is Subset:
            dataset, index = dataset.dataset, int(dataset.indices[index])
        where = f"sample {index} of the {NAMES[self.split]} set"
        if dataset is not self.dataset:  # the number counts the samples of the whole set
            where = f"sample {index} of the {type(dataset).__name__} from which the {NAMES[self.split]} set is taken"
        right = f"it must be the number of its class, 0 to {self.num_classes - 1}, int64"
        return f"data: {where} has the label {label}: {right}{remedy}"

    def check_all(self) -> None:
        """Check all labels, if they can be read without making samples."""
        try:
            labels: Ids = labels_of(self.dataset)
        except UserError:
            if in_memory(self.dataset):
                self((None, innermost_dataset(self.dataset).labels[:1]), [0])
            return
        wrong = np.flatnonzero((labels < 0) | (labels >= self.num_classes))
        if len(wrong):
            raise UserError(self.message(int(wrong[0]), str(labels[wrong[0]]), ""))


def described(label: Tensor) -> tuple[str, str]:
    """Return a label that is no whole number as text, and how to make a number of a class from it."""
    text = ", ".join(f"{value:g}" for value in label.flatten()[:8].tolist()) + ", ..." * (label.numel() > 8)
    kind = str(label.dtype).removeprefix("torch.")
    if label.numel() == 1:
        return f"{'[' * bool(label.ndim)}{text}{']' * bool(label.ndim)} ({kind})", ", as int(label) gives it"
    if label.ndim > 1:
        return f"of shape {list(label.shape)} ({kind})", "; for masks use model=segmentation"
    ones = int((label == 1).sum())
    if ones == 1 and int((label == 0).sum()) == label.numel() - 1:
        return f"[{text}], which is one-hot", (
            ", as label.argmax() gives it; for several labels of a sample use model=multi_label"
        )
    return f"[{text}] ({kind})", "; for several labels of a sample use model=multi_label"


def first_label(dataset: Any) -> str:
    """Return text about the label of a data set's first sample, where it is no number of a class; empty if unknown."""
    batch = fetch(dataset, np.zeros(1, dtype=np.int64))
    y = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
    if not isinstance(y, Tensor) or not y.numel() or (y.ndim == 1 and y.dtype in KINDS):
        return ""
    label, remedy = described(y[0])
    return f"; sample 0 has the label {label}: for classification it must be the number of its class, int64{remedy}"


def label_checks(splits: Splits) -> dict[str, LabelCheck]:
    """Return the check of each split, for a model that classifies."""
    parts = {"train": splits.train, "val": splits.val, "test": splits.test}
    return {
        name: LabelCheck(dataset, name, splits.spec.num_classes)
        for name, dataset in parts.items()
        if dataset is not None
    }


def spec_mismatch(splits: Splits) -> str:
    """Return what of the first training samples the data's Spec does not describe, for a message; empty if all fits."""
    spec, ids = splits.spec, np.arange(min(64, len(splits.train)))
    batch = fetch(splits.train, ids)
    x, y = batch[:2] if isinstance(batch, tuple | list) and len(batch) > 1 else (None, None)
    shape = (spec.channels, spec.image_size, spec.image_size)
    if isinstance(x, Tensor) and x.ndim == 4 and tuple(x.shape[1:]) != shape:
        actual, described_as = (" x ".join(map(str, each)) for each in (x.shape[1:], shape))
        channels_last = x.shape[3] == spec.channels != x.shape[1]
        right = "return them as [channels, height, width]" if channels_last else "correct the Spec"
        return f"the images are {actual}, and the data's Spec says {described_as}: {right}"
    if spec.task == "classification" and isinstance(y, Tensor) and y.ndim == 1 and y.dtype in KINDS:
        check = label_checks(splits)["train"]
        for each in (check.check_all, lambda: check(batch, ids)):
            try:
                each()
            except (UserError, StepRefused) as refusal:
                return str(refusal)
    return ""


def in_memory(dataset: Any) -> bool:
    """Check whether a data set's labels need no check by batch, since `check_all` sees exactly those."""
    return type(innermost_dataset(dataset)) is ArrayDataset
