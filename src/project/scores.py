"""What is measured of a classifier."""

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lockstep import Count, ExactMean


class Scores(nn.ModuleDict):
    """Loss and accuracy over all samples of an evaluation, exactly, on any layout; of more than ten classes also how
    often the right one is among the first five."""

    def __init__(self, num_classes: int) -> None:
        super().__init__({"loss": ExactMean(), "acc": ExactMean(), "correct": Count(), "count": Count()})
        if num_classes > 10:
            self["acc_top5"] = ExactMean()

    def of(self, stage: str, logits: Tensor, y: Tensor, losses: Tensor) -> dict[str, Metric]:
        """Counts these samples; returns what is to be logged, by its name: `val/acc`."""
        right = logits.argmax(1) == y
        values = {"loss": losses, "acc": right, "correct": right, "count": torch.ones_like(y)}
        if "acc_top5" in self:
            values["acc_top5"] = (logits.topk(5).indices == y[:, None]).any(1)
        scores = {name: score for name, score in self.items() if isinstance(score, Metric)}
        for name, score in scores.items():
            score.update(values[name])
        return {f"{stage}/{name}": score for name, score in scores.items()}


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """The share of logits [n, classes] whose largest is the class y [n]; of mixed labels [n, classes] the largest."""
    return (logits.argmax(1) == (y if y.ndim == 1 else y.argmax(1))).float().mean()
