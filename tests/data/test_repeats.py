"""The judge of samples sees what changes from one fetch of a sample to the next."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data.repeats import other_sample


class Counted(Dataset[tuple[Tensor, int]]):
    """Each sample differs in each `period`-th of its own fetches."""

    def __init__(self, period: int) -> None:
        self.period = period
        self.fetches: Counter[int] = Counter()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.fetches[index] += 1
        return torch.full((1, 2, 2), int(self.fetches[index] % self.period == 0)), 0


@pytest.mark.parametrize(("period", "seen"), [(2, True), (3, True), (4, True), (9, False)])
def test_a_counter_of_each_sample_is_seen(period: int, seen: bool) -> None:
    number = other_sample(Counted(period), np.arange(4), 0, np.zeros(4, dtype=np.int64))
    assert (number is not None) == seen
