"""Means and counts in integers, which do not depend on the order of samples, on chunks, or on devices."""

import torch
from torch import Tensor
from torchmetrics import Metric

FRACTION_BITS = 32  # a value is rounded to 2**-32; the sum of fractions has room for 2**31 samples
LARGEST = 2.0**40  # a larger value counts as not finite, so that the sum of whole parts can't overflow


class ExactMean(Metric):
    """The mean of per-sample values, summed in integers; nan if one of them is not finite."""

    full_state_update = False
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        # sum of whole parts, sum of fractions in units of 2**-32, count of values that are not finite, count of values
        self.add_state("sums", torch.zeros(4, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        """Add values, a float tensor [n].

        Each value is rounded by itself, because a float sum of a chunk would depend on where chunks are cut.
        """
        values = values.double()
        usable = values.abs() < LARGEST  # false for nan
        values = values.where(usable, 0.0)
        whole = values.floor()
        fractions = ((values - whole) * 2.0**FRACTION_BITS).round().long().sum()
        count = torch.full_like(fractions, len(values))
        self.sums += torch.stack((whole.long().sum(), fractions, (~usable).sum(), count))

    def compute(self) -> Tensor:
        """Return the mean, a float64 scalar. It is rounded once, since Python divides integers of any size."""
        whole, fractions, broken, count = self.sums.tolist()
        usable = count and not broken
        mean = ((whole << FRACTION_BITS) + fractions) / (count << FRACTION_BITS) if usable else float("nan")
        return torch.tensor(mean, dtype=torch.float64, device=self.sums.device)


class Count(Metric):
    """The sum of whole numbers, int64."""

    full_state_update = False
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        """Add integers or booleans, a tensor of any shape."""
        self.total += values.sum()

    def compute(self) -> Tensor:
        """Return the sum, an int64 scalar."""
        return self.total
