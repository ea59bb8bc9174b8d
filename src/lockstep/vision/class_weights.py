"""Weigh the losses of samples by their class."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lockstep.errors import UserError


class ClassWeights(Callback):
    """Weighs losses so that their mean over a step is `sum(weight x loss) / sum(weight)`.

    The sums run over the whole step, not over a piece or a device's share, so every layout has the same gradient.

    Args:
        weights: a number above 0 for each class; 'balanced', which is samples / (classes x samples of the class); or
            None for no weights.
        num_classes: number of classes.
    """

    def __init__(self, weights: str | Sequence[float] | None, num_classes: int) -> None:
        is_list = isinstance(weights, Sequence) and all(
            isinstance(w, int | float) and 0 < w < math.inf for w in weights
        )
        if weights not in (None, "balanced") and not (is_list and len(weights) == num_classes):
            ask = f"must be balanced, or {num_classes} numbers above 0, one for each class"
            raise ValueError(f"class_weights={weights}: {ask}")
        self.choice, self.num_classes = weights, num_classes
        self.weights: Tensor | None = None  # float64 [num_classes]; set in `setup`
        self.on_device: Tensor | None = None  # a copy on the module's device
        self.of_step: Tensor | None = None  # [num_classes]; their mean over the samples of the current step is 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if stage != "fit" or self.choice is None:
            return
        weights = self.choice
        if weights == "balanced":
            if data.splits.labels is not None:
                both = "model.class_weights=balanced and data.sampling=balanced both balance the classes"
                raise UserError(f"{both}: leave one of them out")
            counts = torch.from_numpy(data.splits.train_labels()).bincount(minlength=self.num_classes)
            weights = (counts.sum() / (len(counts) * counts.clamp(min=1))).tolist()
        self.weights, self.on_device = torch.tensor(weights, dtype=torch.float64), None

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.weights is not None:
            mean = self.weights[torch.from_numpy(trainer.datamodule.labels_of_step(batch))].mean()
            if self.on_device is None or self.on_device.device != pl_module.device:
                self.on_device = self.weights.to(pl_module.device, non_blocking=True)
            self.of_step = self.on_device / float(mean)  # a number, so that nothing is copied at each step

    def __call__(self, losses: Tensor, y: Tensor) -> Tensor:
        """Return losses [n] of samples with the classes y [n], each times its class's weight in the current step."""
        if self.of_step is None:
            return losses
        if y.ndim > 1:
            raise UserError("model.class_weights can't weigh mixed labels: leave out data.mix or class_weights")
        return losses * self.of_step.to(losses)[y]  # with dp, samples of several devices come here
