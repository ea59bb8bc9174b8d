"""The LightningModule that trains any net which maps images to logits."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lockstep.step.metrics import Count, ExactMean

Batch = tuple[Tensor, Tensor]  # images float [n, channels, size, size], labels int64 [n]


class ImageClassifier(LightningModule):
    """Classifies images into num_classes.

    Args:
        net: maps images to logits [n, num_classes].
        channels, image_size, num_classes: the data set's.
        optimizer: makes the optimizer from parameter groups; conf/optimizer names it.
        scheduler: makes Lightning's `lr_scheduler` from the optimizer; conf/scheduler names it.
        label_smoothing: share of the probability that is spread over all classes, in training only.
        decay_norms_and_biases: whether `weight_decay` holds for them too; by default it does not (He et al., Bag of
            Tricks, 2019).
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        channels: int,
        image_size: int,
        num_classes: int,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        scheduler: Callable[..., Any] | None = None,
        label_smoothing: float = 0.0,
        decay_norms_and_biases: bool = False,
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes={num_classes}: a classifier needs two at least")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing={label_smoothing}: must be at least 0 and below 1")
        self.save_hyperparameters(ignore=["net", "optimizer", "scheduler"], logger=False)  # for load_from_checkpoint
        self.net = net
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.label_smoothing = label_smoothing
        self.decay_norms_and_biases = decay_norms_and_biases
        self.example_input_array = torch.zeros(2, channels, image_size, image_size)
        # Over all samples of an evaluation, exactly, on any layout.
        scores = {"loss": ExactMean(), "acc": ExactMean(), "correct": Count(), "count": Count()}
        self.scores = nn.ModuleDict(scores)
        if num_classes > 10:
            self.scores["acc_top5"] = ExactMean()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Loss of each sample [n]; their mean is trained on. Override it for another loss."""
        if self.training:
            return F.cross_entropy(logits, y, reduction="none", label_smoothing=self.label_smoothing)
        return F.cross_entropy(logits.double(), y, reduction="none")

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        labels = y if y.ndim == 1 else y.argmax(1)  # mixed labels are [n, num_classes]
        return {"loss": self.losses(logits, y).mean(), "acc": (logits.argmax(1) == labels).float().mean()}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._score(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._score(batch)

    def on_validation_epoch_end(self) -> None:
        self._log("val")

    def on_test_epoch_end(self) -> None:
        self._log("test")

    def _score(self, batch: Batch) -> None:
        x, y = batch
        logits = self(x)
        right = logits.argmax(1) == y
        found = {"loss": self.losses(logits, y), "acc": right, "correct": right, "count": torch.ones_like(y)}
        if "acc_top5" in self.scores:
            found["acc_top5"] = (logits.topk(5).indices == y[:, None]).any(1)
        for name, values in found.items():
            cast(Metric, self.scores[name]).update(values)

    def _log(self, stage: str) -> None:
        self.log_dict({f"{stage}/{name}": cast(Metric, score) for name, score in self.scores.items()})

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Probabilities [n, num_classes]; predict.py writes down what this returns."""
        return self(batch[0]).double().softmax(1)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self._parameter_groups())
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """What is trained: weights decay as the optimizer says, norms and biases (one-dimensional) may not."""
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.decay_norms_and_biases:
            return [{"params": trained}]
        weights = {"params": [p for p in trained if p.ndim > 1]}
        others = {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}
        return [group for group in (weights, others) if group["params"]]
