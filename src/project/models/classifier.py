"""The LightningModule that trains any net which maps images to logits."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lockstep.arithmetic.layout import Refusal
from lockstep.run.checks import matching
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
        freeze: patterns of parameter names (`net.layer1.*`) that are not trained. A layer or block of which all are
            frozen computes as in evaluation: no dropout there, and running statistics stay.
        class_weights: what a sample counts for in training, by its class: a number for each, or 'balanced', samples /
            (classes x samples of the class). A step's loss is `sum(weight x loss) / sum(weight)` over all its samples.
        decay_norms_and_biases: whether `weight_decay` holds for them too; by default it does not (He et al., Bag of
            Tricks, 2019).
    """

    step_weights: Tensor | None

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
        decay_norms_and_biases: bool = False,
        freeze: Sequence[str] = (),
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
        self.class_weights = as_weights(class_weights, num_classes)
        # those of the step under way, whose mean over its samples is 1; None: not weighted
        self.register_buffer("step_weights", None if class_weights is None else torch.ones(num_classes), False)
        self.decay_norms_and_biases = decay_norms_and_biases
        self.frozen = self._freeze(freeze)
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
            options: dict[str, Any] = {"weight": self.step_weights, "label_smoothing": self.label_smoothing}
            return F.cross_entropy(logits, y, reduction="none", **options)
        return F.cross_entropy(logits.double(), y, reduction="none")

    def _freeze(self, patterns: Sequence[str]) -> set[str]:
        """Takes what the patterns name out of training; returns their names."""
        if isinstance(patterns, str):
            raise ValueError(f"freeze={patterns}: must be a list, freeze=[{patterns}]")
        names = [name for name, _ in self.named_parameters()]
        try:
            frozen = set(matching(patterns, names))
        except ValueError as error:
            raise ValueError(f"freeze={list(patterns)}: {error}") from None
        if names and len(frozen) == len(names):
            raise ValueError(f"freeze={list(patterns)}: nothing is left to be trained")
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)
        self.train()
        return frozen

    def train(self, mode: bool = True) -> Self:
        """As torch's; but what is frozen as a whole computes as in evaluation."""
        super().train(mode)
        for module in self.net.modules():
            held = [parameter.requires_grad for parameter in module.parameters()]
            if held and not any(held):
                module.eval()
        return self

    def on_train_epoch_start(self) -> None:
        self.train()  # a callback may have unfrozen something

    def setup(self, stage: str) -> None:
        if stage == "fit" and self.step_weights is not None and self._data.splits.mix is not None:
            raise Refusal("model.class_weights and data.mix don't go together: a mixed sample has several classes")
        if stage == "fit" and self.hparams["class_weights"] == "balanced":
            counts = torch.from_numpy(self._data.labels).bincount(minlength=len(self.class_weights))
            self.class_weights = counts.sum() / (len(counts) * counts.clamp(min=1).double())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Over the whole step, not over a piece of it or a device's part: so every layout has the same gradient."""
        if self.step_weights is not None:
            mean = self.class_weights[torch.from_numpy(self._data.labels_of_step(batch))].mean()
            self.step_weights.copy_(self.class_weights / mean)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        if y.ndim > 1 and self.step_weights is not None:
            raise Refusal("model.class_weights and mixed labels don't go together: a sample has several classes")
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

    @property
    def _data(self) -> Any:
        trainer: Any = self.trainer
        return trainer.datamodule

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Probabilities [n, num_classes]; predict.py writes down what this returns."""
        return self(batch[0]).double().softmax(1)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self._parameter_groups())
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """What is trained: weights decay as the optimizer says, norms and biases (one-dimensional) may not. So is what
        `freeze` names: without a gradient it stays as it is, and may be unfrozen (project.unfreezing)."""
        trained = [p for name, p in self.named_parameters() if p.requires_grad or name in self.frozen]
        if self.decay_norms_and_biases:
            return [{"params": trained}]
        weights = {"params": [p for p in trained if p.ndim > 1]}
        others = {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}
        return [group for group in (weights, others) if group["params"]]


def as_weights(given: str | Sequence[float] | None, num_classes: int) -> Tensor:
    """Class weights float64 [num_classes]; 'balanced' ones are known when the data is open, and 1 until then."""
    if given is None or given == "balanced":
        return torch.ones(num_classes, dtype=torch.float64)
    above = isinstance(given, Sequence) and all(isinstance(w, int | float) and 0 < w < math.inf for w in given)
    if not above or len(given) != num_classes:
        raise ValueError(f"class_weights={given}: must be balanced, or {num_classes} numbers above 0, one for a class")
    return torch.tensor(given, dtype=torch.float64)
