"""The check of samples: images are as the Spec says, and for a model that classifies labels are numbers of classes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from lockstep.data.datasets import ArrayDataset, fetch, innermost_dataset, labels_of
from lockstep.data.splits import Spec, Splits
from lockstep.errors import StepRefused, UserError

NAMES = {"train": "training", "val": "validation", "test": "test"}
KINDS = (torch.int64, torch.uint8)  # of labels with which torch's cross_entropy computes


class SampleCheck:
    """Check batches on the host, before a device gets them: a label out of range would stop a GPU.

    Args:
        dataset: the data set of a split.
        split: `train`, `val` or `test`.
        spec: the description of its images.
        labels: whether each label must be the number of a class.
    """

    def __init__(self, dataset: Any, split: str, spec: Spec, labels: bool = True) -> None:
        self.dataset, self.split, self.spec, self.labels = dataset, split, spec, labels
        # A collate_fn of the user's own may change sizes, and mix the samples of a training batch, with a share of each
        # class as label.
        self.collates = hasattr(innermost_dataset(dataset), "collate_fn")

    def __call__(self, batch: Any, ids: Any) -> None:
        """Check a batch of samples.

        Args:
            batch: what the data set returns, collated.
            ids: numbers of its samples in the split, [n].
        """
        x, y = batch[:2] if isinstance(batch, tuple | list) and len(batch) > 1 else (None, None)
        if wrong := self._wrong_image(x):
            raise StepRefused(wrong)
        if not self.labels or not isinstance(y, Tensor) or not y.numel() or len(y) != len(ids):
            return
        classes = self.spec.num_classes
        if y.ndim == 1 and y.dtype in KINDS:
            wrong_rows = ((y < 0) | (y >= classes)).nonzero()
            if len(wrong_rows):
                row = int(wrong_rows[0])
                raise StepRefused(self.message(int(ids[row]), str(int(y[row])), ""))
        elif not (self.collates and self.split == "train" and y.is_floating_point() and y.shape[1:] == (classes,)):
            raise StepRefused(self.message(int(ids[0]), *described(y[0])))

    def _wrong_image(self, x: Any) -> str:
        """Return what is wrong with images [n, C, H, W]; empty if they are as the Spec says, or are no images.

        A Spec has one size, so of images that are not square it must have the height or the width.
        """
        spec = self.spec
        if self.collates or not isinstance(x, Tensor) or x.ndim != 4:
            return ""
        if x.shape[1] == spec.channels and spec.image_size in x.shape[2:]:
            return ""
        shape = (spec.channels, spec.image_size, spec.image_size)
        actual, described_as = (" x ".join(map(str, each)) for each in (x.shape[1:], shape))
        channels_last = x.shape[3] == spec.channels != x.shape[1]
        right = "return them as [channels, height, width]" if channels_last else "correct the Spec"
        where = f"the images of the {NAMES[self.split]} set"
        return f"data: {where} are {actual}, and the data's Spec says {described_as}: {right}"

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
        right = f"it must be the number of its class, 0 to {self.spec.num_classes - 1}, int64"
        return f"data: {where} has the label {label}: {right}{remedy}"

    def check_all(self) -> None:
        """Check what is known without making samples: images in memory, and all labels."""
        memory = innermost_dataset(self.dataset) if in_memory(self.dataset) else None
        if memory is not None and (wrong := self._wrong_image(memory.images)):
            raise UserError(wrong)
        if not self.labels:
            return
        labels = labels_of(self.dataset)
        if labels is None:
            if memory is not None:
                self((None, memory.labels[:1]), [0])
            return
        wrong_rows = np.flatnonzero((labels < 0) | (labels >= self.spec.num_classes))
        if len(wrong_rows):
            raise UserError(self.message(int(wrong_rows[0]), str(labels[wrong_rows[0]]), ""))


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


def sample_checks(splits: Splits, labels: bool) -> dict[str, SampleCheck]:
    """Return the check of each split; `labels`: whether also that of labels, for a model that classifies."""
    parts = {"train": splits.train, "val": splits.val, "test": splits.test}
    return {
        name: SampleCheck(dataset, name, splits.spec, labels) for name, dataset in parts.items() if dataset is not None
    }


def wrong_label(splits: Splits) -> str:
    """Return what is wrong with labels that may be numbers of classes, after a module has failed; empty if nothing."""
    ids = np.arange(min(64, len(splits.train)))
    batch = fetch(splits.train, ids)
    y = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
    if splits.spec.task != "classification" or not isinstance(y, Tensor) or y.ndim != 1 or y.dtype not in KINDS:
        return ""
    check = sample_checks(splits, labels=True)["train"]
    try:
        check.check_all()
        check(batch, ids)
    except (UserError, StepRefused) as refusal:
        return str(refusal)
    return ""


def in_memory(dataset: Any) -> bool:
    """Check whether a data set's samples need no check by batch, since `check_all` sees exactly those."""
    return type(innermost_dataset(dataset)) is ArrayDataset
