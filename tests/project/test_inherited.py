"""The tests that users inherit, for the template's own; and data sets that fail them."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import ArrayDataset, Spec
from lockstep.data import Splits
from lockstep.testing import DataTests, ModuleTests


@pytest.mark.slow
class TestMnistCNN(ModuleTests):
    overrides = "model=mnist_cnn model.dropout=0.3 data=synthetic data.samples=200 data.image_size=12"


class TestDigits(DataTests):
    overrides = "data=digits data/transforms=trivial_augment"


SPEC = Spec(1, 12, ("a", "b"))
IMAGES = np.random.default_rng(0).integers(0, 256, (20, 1, 12, 12), dtype=np.uint8)


def splits(train: Any, spec: Spec = SPEC) -> Splits:
    return Splits(train, None, None, spec, "")


class SharedFile:
    """Items of a file that was opened before processes were forked: each moves the others' position."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(IMAGES.tobytes())
        self.file = os.open(path, os.O_RDONLY)

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, index: int) -> Any:
        os.lseek(self.file, index * 144, os.SEEK_SET)
        time.sleep(0.005)
        content = os.read(self.file, 144).ljust(144)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(1, 12, 12), torch.tensor(index % 2)


class Counting(SharedFile):
    """Items that depend on how often one was fetched."""

    count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        image, label = super().__getitem__(index)
        return image + self.count, label


def test_data_that_do_not_keep_it_fail(tmp_path: Path) -> None:
    tests, shared = DataTests(), splits(SharedFile(tmp_path / "images"))
    tests.test_samples_are_as_the_spec_has_them(shared)  # the controls
    tests.test_samples_are_the_same_when_they_are_fetched_again(shared)
    with pytest.raises(AssertionError):
        tests.test_other_processes_fetch_the_same(shared)
    with pytest.raises(AssertionError):
        tests.test_samples_are_the_same_when_they_are_fetched_again(splits(Counting(tmp_path / "counted")))
    labels = np.arange(20) % 3
    for wrong in (Spec(3, 12, ("a", "b", "c")), Spec(1, 14, ("a", "b", "c")), SPEC):
        with pytest.raises(AssertionError):
            tests.test_samples_are_as_the_spec_has_them(splits(ArrayDataset(IMAGES, labels), wrong))
