"""Train a net on numbers."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lockstep import ExactMean


class Regression(LightningModule):
    """Predicts one number or several for each image. It is trained on Huber's loss: large errors count by their size.

    Args:
        net: maps images to [n, num_classes], one column for each number. 0 stands for `center`, 1 for `center + scale`.
        optimizer: makes the optimizer; conf/optimizer names it.
        scheduler: makes Lightning's `lr_scheduler` from the optimizer; conf/scheduler names it.
        center: a usual number of the training set, such as the mean.
        scale: a usual distance from it, such as the standard deviation.
    """

    task = "regression"  # of the data: targets are float [n, num_classes]

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[..., Any],
        scheduler: Callable[..., Any] | None,
        center: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.net, self.optimizer, self.scheduler = net, optimizer, scheduler
        self.center, self.scale = center, scale
        self.scores: Any = nn.ModuleDict({"loss": ExactMean(), "mae": ExactMean()})

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale + self.center

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.huber_loss(self.net(x), (y.to(x.dtype) - self.center) / self.scale)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, stage: str = "val") -> None:
        values, y = self(batch[0]).double(), batch[1].double()
        self.scores["loss"].update(F.huber_loss(values / self.scale, y / self.scale, reduction="none").mean(1))
        self.scores["mae"].update((values - y).abs().mean(1))
        self.log_dict({f"{stage}/{name}": score for name, score in self.scores.items()})

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx, "test")

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)} if self.scheduler else optimizer
