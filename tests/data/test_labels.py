"""Samples unlike their Spec are refused: labels that are no numbers of classes, with the sample, and other images."""

from contextlib import nullcontext as noop
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_data import arrays
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from lockstep.arithmetic.layout import Assignment, resolve
from lockstep.arithmetic.order import DataOrder
from lockstep.data import ArrayDataset, Spec
from lockstep.data.augment import Augment
from lockstep.data.labels import SampleCheck
from lockstep.data.loaders import ChunkDataset, StepDataset
from lockstep.data.user_loaders import read_loader
from lockstep.errors import StepRefused, UserError

CLASSES = 10
SPEC = Spec(1, 4, tuple("abcdefghij"))
THREE = Spec(1, 4, ("a", "b", "c"))


def labels() -> Tensor:
    return torch.arange(30) % CLASSES


def data(y: Tensor) -> TensorDataset:
    return TensorDataset(torch.zeros(len(y), 1, 4, 4), y)


def changed(value: int) -> Tensor:
    y = labels()
    y[5] = value
    return y


SOFT = torch.full((30, CLASSES), 1 / CLASSES)
WRONG: dict[str, tuple[Tensor, str]] = {
    "too large": (
        changed(10),
        "sample 5 of the training set has the label 10: it must be the number of its class, 0 to 9",
    ),
    "negative": (changed(-1), "sample 5 of the training set has the label -1: it must be the number"),
    "ignored elsewhere": (changed(-100), "sample 5 of the training set has the label -100"),
    "one-hot": (
        torch.nn.functional.one_hot(labels(), CLASSES),
        r"sample 0 .* which is one-hot: .* as label.argmax\(\) gives it; for several labels .* model=multi_label",
    ),
    "float one-hot": (torch.nn.functional.one_hot(labels(), CLASSES).float(), "which is one-hot"),
    "several": ((torch.rand(30, CLASSES) > 0.5).float(), "use model=multi_label"),
    "float": (labels().float() + 1, r"sample 0 of the training set has the label 1 \(float32\): .* as int\(label\)"),
    "column": (labels()[:, None], r"sample 0 of the training set has the label \[0\] \(int64\)"),
    "int32": (labels().int(), r"label 0 \(int32\)"),
    "soft": (SOFT, r"label \[0.1, .*\] \(float32\)"),
    "mask": (torch.zeros(30, 4, 4, dtype=torch.int64), r"of shape \[4, 4\] .*use model=segmentation"),
}


@pytest.mark.parametrize(("y", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_label_is_refused_where_it_is_fetched(y: Tensor, message: str) -> None:
    dataset = data(y)
    layout = resolve(strategy="single", accelerator="cpu", devices=1, num_nodes=1, batch_size=30, pieces=1)
    order, check = DataOrder(30, layout, 0), SampleCheck(dataset, "train", SPEC)
    steps = StepDataset(dataset, order, 0, Augment(), Assignment(layout), check)
    with pytest.raises(StepRefused, match=r"data: sample \d+ of the training set has .*: it must be the number of its"):
        steps.__getitems__((0, 0))
    with pytest.raises(StepRefused, match=message):
        ChunkDataset(dataset, SampleCheck(dataset, "train", SPEC)).__getitems__(range(30))


def test_right_labels_pass() -> None:
    for y in (labels(), labels().to(torch.uint8)):
        dataset = data(y)
        ChunkDataset(dataset, SampleCheck(dataset, "val", SPEC)).__getitems__(range(30))
    loader = DataLoader(data(labels()), collate_fn=lambda samples: (default_collate(samples)[0], SOFT[: len(samples)]))
    mixed = read_loader(loader, "", trains=True).dataset  # type: ignore[union-attr]
    ChunkDataset(mixed, SampleCheck(mixed, "train", SPEC)).__getitems__(range(30))
    with pytest.raises(StepRefused):
        ChunkDataset(mixed, SampleCheck(mixed, "val", SPEC)).__getitems__(range(30))
    masks = {"image": torch.zeros(2)}
    SampleCheck([], "train", SPEC)(masks, range(2))


def test_a_sample_has_its_number_in_the_users_data_set() -> None:
    dataset = Subset(data(changed(10)), [20, 5, 3])
    message = "data: sample 5 of the TensorDataset from which the training set is taken has the label 10"
    with pytest.raises(StepRefused, match=message):
        ChunkDataset(dataset, SampleCheck(dataset, "train", SPEC)).__getitems__(range(3))


class Named(Dataset[Any]):
    """It has its labels as an attribute."""

    def __init__(self, targets: list[int]) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample is made")


def test_labels_that_an_attribute_has_are_all_checked_before_a_sample_is_made() -> None:
    with pytest.raises(UserError, match=r"sample 2 of the test set has the label 3: .* 0 to 2"):
        SampleCheck(Named([0, 1, 3, 4]), "test", THREE).check_all()
    SampleCheck(Named([0, 1, 2, 0]), "test", THREE).check_all()


def test_images_that_the_spec_does_not_describe_are_refused_where_they_are_fetched() -> None:
    dataset = data(labels())
    for spec, right in (
        (Spec(1, 4, SPEC.classes), ""),
        (Spec(1, 3, SPEC.classes), r"are 1 x 4 x 4, and the data's Spec says 1 x 3 x 3: correct the Spec"),
        (Spec(3, 4, SPEC.classes), r"are 1 x 4 x 4, and the data's Spec says 3 x 4 x 4: correct the Spec"),
    ):
        for made in (dataset, ArrayDataset(np.zeros((30, 1, 4, 4), np.uint8), labels().numpy())):
            check = SampleCheck(made, "val", spec, labels=False)
            with pytest.raises(UserError, match=f"data: the images of the validation set {right}") if right else noop():
                check.check_all()
                ChunkDataset(made, check).__getitems__(range(30))
    upright = TensorDataset(torch.zeros(2, 3, 6, 5), torch.zeros(2).long())  # a Spec has one size
    for size, fits in ((6, True), (5, True), (4, False)):
        with noop() if fits else pytest.raises(StepRefused, match="3 x 6 x 5"):
            ChunkDataset(upright, SampleCheck(upright, "test", Spec(3, size, ("a",)))).__getitems__(range(2))
    flipped = TensorDataset(torch.zeros(2, 4, 4, 1), torch.zeros(2).long())
    with pytest.raises(StepRefused, match=r"return them as \[channels, height, width\]"):
        ChunkDataset(flipped, SampleCheck(flipped, "train", SPEC)).__getitems__(range(2))
    padded = read_loader(DataLoader(upright, collate_fn=default_collate), "", trains=True).dataset  # type: ignore
    padded.collate_fn = default_collate  # it may give each batch a size of its own
    ChunkDataset(padded, SampleCheck(padded, "train", Spec(3, 4, ("a",)))).__getitems__(range(2))


def test_labels_in_memory(tmp_path: Path) -> None:
    one_hot = ArrayDataset(np.zeros((3, 1, 4, 4), np.uint8), np.eye(3, dtype=np.float32))
    with pytest.raises(UserError, match=r"sample 0 of the training set has the label \[1, 0, 0\], which is one-hot"):
        SampleCheck(one_hot, "train", THREE).check_all()
    SampleCheck(arrays(20), "train", Spec(1, 6, tuple("abcdefghijklmnopqrst"))).check_all()
    with pytest.raises(ValueError, match=r"sample 1 has the label 0\.5: it must be a whole number"):
        ArrayDataset(np.zeros((2, 1, 4, 4), np.uint8), np.array([0.0, 0.5]))
