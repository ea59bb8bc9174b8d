"""Means and counts in integers: the same numbers however samples are ordered, cut into chunks or dealt to devices."""

import torch
from torch import Tensor
from torchmetrics import Metric

FRACTION_BITS = 32  # a value is kept to 2**-32; the sum of fractions has room for 2**31 samples
LARGEST = 2.0**40  # a value beyond it counts as non-finite, so that the sum of whole parts can't overflow either


class ExactMean(Metric):
    """Mean of per-sample values, whose sum is kept in integers; nan where one of them was not finite."""

    full_state_update = False
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        # whole parts, fractions in units of 2**-32, values that are not finite, values
        self.add_state("sums", torch.zeros(4, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        """Adds values [n]. Each is rounded by itself: a float sum of a chunk would depend on where chunks are cut."""
        values = values.double()
        usable = values.abs() < LARGEST  # false for nan
        values = values.where(usable, 0.0)
        whole = values.floor()
        fractions = ((values - whole) * 2.0**FRACTION_BITS).round().long().sum()
        count = torch.full_like(fractions, len(values))
        self.sums += torch.stack((whole.long().sum(), fractions, (~usable).sum(), count))

    def compute(self) -> Tensor:
        """The mean float64, rounded once: Python divides integers of any size."""
        whole, fractions, broken, count = self.sums.tolist()
        usable = count and not broken
        mean = ((whole << FRACTION_BITS) + fractions) / (count << FRACTION_BITS) if usable else float("nan")
        return torch.tensor(mean, dtype=torch.float64, device=self.sums.device)


class Count(Metric):
    """Sum of whole numbers, int64."""

    full_state_update = False
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        """Adds integers or truth values, of any shape."""
        self.total += values.sum()

    def compute(self) -> Tensor:
        return self.total
