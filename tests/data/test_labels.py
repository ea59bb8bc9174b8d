"""Labels that are no numbers of classes are refused as data, with the sample and the value."""

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
from lockstep.data import ArrayDataset
from lockstep.data.augment import Augment
from lockstep.data.labels import LabelCheck
from lockstep.data.loaders import ChunkDataset, StepDataset
from lockstep.data.user_loaders import read_loader
from lockstep.errors import StepRefused, UserError

CLASSES = 10


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
    order, check = DataOrder(30, layout, 0), LabelCheck(dataset, "train", CLASSES)
    steps = StepDataset(dataset, order, 0, Augment(), Assignment(layout), check)
    with pytest.raises(StepRefused, match=r"data: sample \d+ of the training set has .*: it must be the number of its"):
        steps.__getitems__((0, 0))
    with pytest.raises(StepRefused, match=message):
        ChunkDataset(dataset, LabelCheck(dataset, "train", CLASSES)).__getitems__(range(30))


def test_right_labels_pass() -> None:
    for y in (labels(), labels().to(torch.uint8)):
        dataset = data(y)
        ChunkDataset(dataset, LabelCheck(dataset, "val", CLASSES)).__getitems__(range(30))
    loader = DataLoader(data(labels()), collate_fn=lambda samples: (default_collate(samples)[0], SOFT[: len(samples)]))
    mixed = read_loader(loader, "", trains=True).dataset  # type: ignore[union-attr]
    ChunkDataset(mixed, LabelCheck(mixed, "train", CLASSES)).__getitems__(range(30))
    with pytest.raises(StepRefused):
        ChunkDataset(mixed, LabelCheck(mixed, "val", CLASSES)).__getitems__(range(30))
    masks = {"image": torch.zeros(2)}
    LabelCheck([], "train", CLASSES)(masks, range(2))


def test_a_sample_has_its_number_in_the_users_data_set() -> None:
    dataset = Subset(data(changed(10)), [20, 5, 3])
    message = "data: sample 5 of the TensorDataset from which the training set is taken has the label 10"
    with pytest.raises(StepRefused, match=message):
        ChunkDataset(dataset, LabelCheck(dataset, "train", CLASSES)).__getitems__(range(3))


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
        LabelCheck(Named([0, 1, 3, 4]), "test", 3).check_all()
    LabelCheck(Named([0, 1, 2, 0]), "test", 3).check_all()


def test_labels_in_memory(tmp_path: Path) -> None:
    one_hot = ArrayDataset(np.zeros((3, 1, 4, 4), np.uint8), np.eye(3, dtype=np.float32))
    with pytest.raises(UserError, match=r"sample 0 of the training set has the label \[1, 0, 0\], which is one-hot"):
        LabelCheck(one_hot, "train", 3).check_all()
    LabelCheck(arrays(20), "train", 20).check_all()
    with pytest.raises(ValueError, match=r"sample 1 has the label 0\.5: it must be a whole number"):
        ArrayDataset(np.zeros((2, 1, 4, 4), np.uint8), np.array([0.0, 0.5]))
