"""What a classifier said about each sample of an evaluation, in counts that are the same on every layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.loading import Spec

THRESHOLDS = 101  # of a precision-recall curve: 0, 0.01, ... 1


class PredictionStats:
    """Counts and the worst mistakes, over the samples added, and with `gather` over all ranks.

    Args:
        spec: the data's; it gives the number of classes and the images' shape, so that ranks without a sample join.
        keep: mistakes kept, those with the largest loss.
        device: where samples come from.

    Attributes:
        confusion: int64 [C, C], row = label, column = prediction.
        scores: int64 [C, 2, THRESHOLDS]: how many samples got the probability t / (THRESHOLDS - 1) or a bit more for
            class c, and are of it (1) or not (0).
        losses: float64 [keep], worst first; -1 where there are fewer mistakes.
        labels, predictions: int64 [keep].
        probabilities: float64 [keep], of the prediction.
        images: uint8 [keep, channels, size, size].
    """

    def __init__(self, spec: Spec, keep: int, device: torch.device) -> None:
        classes = self.classes = spec.num_classes
        self.spec = spec
        self.confusion = torch.zeros(classes, classes, dtype=torch.int64, device=device)
        self.scores = torch.zeros(classes, 2, THRESHOLDS, dtype=torch.int64, device=device)
        self.losses = torch.full((keep,), -1.0, dtype=torch.float64, device=device)
        self.probabilities = torch.zeros(keep, dtype=torch.float64, device=device)
        self.labels = torch.zeros(keep, dtype=torch.int64, device=device)
        self.predictions = torch.zeros(keep, dtype=torch.int64, device=device)
        shape = spec.channels, spec.image_size, spec.image_size
        self.images = torch.zeros(keep, *shape, dtype=torch.uint8, device=device)

    def fits(self, x: Any, logits: Any, y: Any) -> bool:
        """Whether these are images of this data, a score for each class, and labels."""
        return (
            isinstance(x, Tensor)
            and isinstance(y, Tensor)
            and isinstance(logits, Tensor)
            and logits.is_floating_point()
            and tuple(logits.shape) == (len(x), self.classes)
            and x.shape[1:] == self.images.shape[1:]
            and y.dtype == torch.int64
            and y.shape == (len(x),)
            and bool(((y >= 0) & (y < self.classes)).all())
        )

    def add(self, x: Tensor, logits: Tensor, y: Tensor) -> None:
        """Adds n samples: normalised images x, logits or log-probabilities [n, C], labels y [n]."""
        logs = logits.double().log_softmax(dim=1)
        predictions = logits.argmax(dim=1)
        n, classes = logs.shape
        self.confusion += (y * classes + predictions).bincount(minlength=classes**2).view(classes, classes)
        bucket = (logs.exp() * (THRESHOLDS - 1)).long().clamp_(0, THRESHOLDS - 1)
        columns = torch.arange(classes, device=y.device)
        at = (columns * 2 + (columns == y[:, None])) * THRESHOLDS + bucket
        self.scores += at.flatten().bincount(minlength=self.scores.numel()).view_as(self.scores)
        losses = -logs.gather(1, y[:, None])[:, 0]
        losses = losses.masked_fill(predictions == y, -1.0)
        worst = losses.topk(min(len(self.losses), n)).indices
        probabilities = logs[worst, predictions[worst]].exp()
        self._keep(losses[worst], probabilities, y[worst], predictions[worst], self._pixels(x[worst]))

    def gather(self, strategy: Any, world_size: int) -> None:
        """Adds what the other ranks have; every rank must call it."""
        if world_size == 1:
            return
        self.confusion = strategy.reduce(self.confusion, reduce_op="sum")
        self.scores = strategy.reduce(self.scores, reduce_op="sum")
        kept = self.losses, self.probabilities, self.labels, self.predictions, self.images
        losses, *others = (strategy.all_gather(part).flatten(0, 1) for part in kept)
        self.losses.fill_(-1.0)
        self._keep(losses, *others)

    def mistakes(self) -> int:
        """How many are kept."""
        return int((self.losses >= 0).sum())

    def _keep(self, losses: Tensor, *others: Tensor) -> None:
        """The worst of those kept and these."""
        losses = torch.cat([self.losses, losses])
        best = losses.argsort(descending=True, stable=True)[: len(self.losses)]
        kept = self.probabilities, self.labels, self.predictions, self.images
        self.losses = losses[best]
        self.probabilities, self.labels, self.predictions, self.images = (
            torch.cat([old, new])[best] for old, new in zip(kept, others, strict=True)
        )

    def _pixels(self, x: Tensor) -> Tensor:
        mean, std = (x.new_tensor(moments).view(-1, 1, 1) for moments in (self.spec.mean, self.spec.std))
        return ((x * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


def curve(scores: Tensor) -> dict[str, Tensor]:
    """A precision-recall curve from counts [2, THRESHOLDS] (see `PredictionStats.scores`), by TensorBoard's names.

    Of a threshold that no sample reaches, the precision is 1: nothing was taken for the class by mistake.
    """
    false, true = scores.flip(-1).cumsum(-1).flip(-1)
    found = true + false
    return {
        "true_positive_counts": true,
        "false_positive_counts": false,
        "true_negative_counts": false[0] - false,
        "false_negative_counts": true[0] - true,
        "precision": torch.where(found > 0, true / found.clamp(min=1), 1.0),
        "recall": true / true[0].clamp(min=1),
    }
