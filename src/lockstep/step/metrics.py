"""Evaluation in integers: the same numbers however samples are ordered, cut into chunks or dealt to devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

FRACTION_BITS = 32  # a loss is kept to 2**-32; the sum of fractions has room for 2**31 samples
LARGEST = 2.0**40  # a loss beyond it counts as non-finite, so that the sum of whole parts can't overflow either


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

    def compute(self) -> float:
        """The mean, rounded once: Python divides integers of any size."""
        whole, fractions, broken, count = self.sums.tolist()
        if broken or not count:
            return float("nan")
        return ((whole << FRACTION_BITS) + fractions) / (count << FRACTION_BITS)


class Evaluation(torch.nn.Module):
    """The metrics of an evaluation: loss, accuracy, confusion matrix, and top-5 accuracy above ten classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.loss = ExactMean()
        self.confusion = MulticlassConfusionMatrix(classes, validate_args=False)
        self.top5 = MulticlassAccuracy(classes, top_k=5, average="micro", validate_args=False) if classes > 10 else None

    def update(self, losses: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Adds n samples: losses [n], logits [n, C], labels int64 [n]."""
        self.loss.update(losses)
        self.confusion.update(logits, labels)
        if self.top5 is not None:
            self.top5.update(logits, labels)

    def compute(self) -> tuple[dict[str, float], Tensor]:
        """`loss`, `acc`, `correct`, `count` (and `acc_top5`) over all processes, and the confusion matrix int64 [C, C]
        (row = label, column = prediction) on the CPU. Every process must call it."""
        matrix = self.confusion.compute().cpu()
        correct, count = int(matrix.diagonal().sum()), int(matrix.sum())
        found: dict[str, Any] = {"loss": self.loss.compute(), "acc": correct / count if count else float("nan")}
        found |= {"correct": correct, "count": count}
        if self.top5 is not None:
            found["acc_top5"] = float(self.top5.compute())
        return found, matrix

    def reset(self) -> None:
        """Forgets what was added."""
        self.loss.reset()
        self.confusion.reset()
        if self.top5 is not None:
            self.top5.reset()
