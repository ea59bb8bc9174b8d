"""Measure a classifier: loss, accuracy, top-5 accuracy."""

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lockstep.step.metrics import Count, ExactMean


class Scores(nn.ModuleDict):
    """Computes loss and accuracy over all samples of an evaluation, exactly and on any layout.

    With more than ten classes it also computes the top-5 accuracy.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__({"loss": ExactMean(), "acc": ExactMean(), "correct": Count(), "count": Count()})
        if num_classes > 10:
            self["acc_top5"] = ExactMean()

    def of(self, stage: str, logits: Tensor, y: Tensor, losses: Tensor) -> dict[str, Metric]:
        """Count a batch and return the metrics to log, by name: `val/acc`.

        Args:
            stage: val or test.
            logits: float [n, classes].
            y: classes, int64 [n].
            losses: loss of each sample, float [n].
        """
        right = logits.argmax(1) == y
        values = {"loss": losses, "acc": right, "correct": right, "count": torch.ones_like(y)}
        if "acc_top5" in self:
            values["acc_top5"] = (logits.topk(5).indices == y[:, None]).any(1)
        scores = {name: score for name, score in self.items() if isinstance(score, Metric)}
        for name, score in scores.items():
            score.update(values[name])
        return {f"{stage}/{name}": score for name, score in scores.items()}


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the accuracy of logits [n, classes], 0-dim. Of mixed labels y [n, classes] the largest is the class."""
    return (logits.argmax(1) == (y if y.ndim == 1 else y.argmax(1))).mean(dtype=torch.float32)
