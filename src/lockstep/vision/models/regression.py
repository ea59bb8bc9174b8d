"""Train a net on numbers."""

from typing import Any, ClassVar

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lockstep.step.metrics import ExactMean
from lockstep.vision.models.published import torchvision_net


class Regression(LightningModule):
    """Predicts one number or several for each image. lockstep/conf/model/regression.yaml describes the options.

    It is trained on Huber's loss, which grows with the square of a small error, and with the size of a large one.
    """

    task = "regression"  # of the data: targets are float [n, num_classes]
    without_pretrained: ClassVar = {"pretrained": False}

    def __init__(
        self,
        arch: str,
        channels: int,
        image_size: int,
        num_classes: int,
        optimizer: Any,
        scheduler: Any,
        pretrained: bool,
        center: float,
        scale: float,
    ) -> None:
        super().__init__()
        self.net = torchvision_net(arch, channels, image_size, num_classes, pretrained)
        self.optimizer, self.scheduler = optimizer, scheduler
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
