"""Train any net that maps images to logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from lockstep.vision.class_weights import ClassWeights
from lockstep.vision.parameters import Freeze, groups
from lockstep.vision.scores import Scores, accuracy

Batch = tuple[Tensor, Tensor]  # images [n, channels, size, size]; labels int64 [n], or float [n, num_classes]


class ImageClassifier(LightningModule):
    """Classifies images into num_classes.

    Args:
        net: maps images to logits [n, num_classes].
        channels: channels of the images.
        image_size: pixels of the images.
        num_classes: number of classes.
        optimizer: makes the optimizer from parameter groups; conf/optimizer names it.
        scheduler: makes Lightning's `lr_scheduler` from the optimizer; conf/scheduler names it.
        label_smoothing: share of the probability that is spread over all classes, in training only.
        class_weights: weights of the samples in training by class; see `ClassWeights`.
        freeze: patterns of the names of parameters that are not trained; see `Freeze`.
        train_only: instead of `freeze`: patterns of the names of the only parameters that are trained.
        decay_norms_and_biases: whether `weight_decay` applies to norms and biases too.

    Raises:
        ValueError: An option is out of range.
    """

    task = "classification"  # of the data: targets are numbers of classes, int64 [n]

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
        class_weights: str | Sequence[float] | None = None,
        freeze: Sequence[str] = (),
        train_only: Sequence[str] = (),
        decay_norms_and_biases: bool = False,
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes={num_classes}: must be at least 2")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing={label_smoothing}: must be at least 0 and below 1")
        self.save_hyperparameters(ignore=["net", "optimizer", "scheduler"], logger=False)  # for load_from_checkpoint
        self.net = net
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.label_smoothing = label_smoothing
        self.class_weights = ClassWeights(class_weights, num_classes)
        self.frozen = Freeze(self, freeze, train_only)
        self.frozen_parameters = self.frozen.names
        self.decay_norms_and_biases = decay_norms_and_biases
        self.scores = Scores(num_classes)
        self.example_input_array = torch.zeros(2, channels, image_size, image_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample [n]. Override it for another loss.

        The model is trained on the mean, weighted by class.
        """
        if self.training:
            return F.cross_entropy(logits, y, reduction="none", label_smoothing=self.label_smoothing)
        return F.cross_entropy(logits.double(), y, reduction="none")

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        loss = self.class_weights(self.losses(logits, y), y).mean()
        return {"loss": loss, "acc": accuracy(logits, y)}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._score("val", *batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._score("test", *batch)

    def _score(self, stage: str, x: Tensor, y: Tensor) -> None:
        logits = self(x)
        self.log_dict(self.scores.of(stage, logits, y, self.losses(logits, y)))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return probabilities [n, num_classes], which predict.py writes to its table."""
        return self(batch[0]).double().softmax(1)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(groups(self, self.decay_norms_and_biases))
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}

    def configure_callbacks(self) -> list[Callback]:
        return [self.class_weights, self.frozen]
