"""Train a net on several labels per image."""

from typing import Any, ClassVar

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MultilabelF1Score

from lockstep.step.metrics import ExactMean
from lockstep.vision.models.published import torchvision_net


class MultiLabel(LightningModule):
    """Decides for each label whether an image has it. lockstep/conf/model/multi_label.yaml describes the options."""

    task = "multi_label"  # of the data: targets are 0 or 1, float [n, num_classes]
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
    ) -> None:
        super().__init__()
        self.net = torchvision_net(arch, channels, image_size, num_classes, pretrained)
        self.optimizer, self.scheduler = optimizer, scheduler
        self.scores: Any = nn.ModuleDict(
            {"loss": ExactMean(), "acc": ExactMean(), "f1": MultilabelF1Score(num_classes)}
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.binary_cross_entropy_with_logits(self(x), y.to(x.dtype))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, stage: str = "val") -> None:
        x, y = batch
        logits = self(x).double()
        self.scores["loss"].update(F.binary_cross_entropy_with_logits(logits, y.double(), reduction="none").mean(1))
        self.scores["acc"].update(((logits > 0) == (y > 0)).double().mean(1))
        self.scores["f1"].update(logits.sigmoid(), y.long())
        self.log_dict({f"{stage}/{name}": score for name, score in self.scores.items()})

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx, "test")

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).double().sigmoid()

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)} if self.scheduler else optimizer
