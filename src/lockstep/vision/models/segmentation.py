"""Train a segmentation net of torchvision."""

from typing import Any, ClassVar

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassJaccardIndex

from lockstep.step.metrics import ExactMean
from lockstep.vision.models.published import segmentation_net


class Segmentation(LightningModule):
    """Gives each pixel a class. lockstep/conf/model/segmentation.yaml describes the options.

    The loss of an image is the mean over its pixels, so images count alike however many pixels have a class.
    """

    task = "segmentation"  # of the data: targets are uint8 [n, size, size], 255 where a pixel does not count
    without_pretrained: ClassVar = {"pretrained": False}

    def __init__(self, arch: str, channels: int, num_classes: int, optimizer: Any, scheduler: Any, pretrained: bool):
        super().__init__()
        self.net = segmentation_net(arch, channels, num_classes, pretrained)
        self.optimizer, self.scheduler = optimizer, scheduler
        iou = MulticlassJaccardIndex(num_classes, ignore_index=255)
        self.scores: Any = nn.ModuleDict({"loss": ExactMean(), "iou": iou})

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)["out"]  # logits [n, num_classes, size, size]

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y.long(), ignore_index=255, reduction="none").mean((1, 2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.losses(self(batch[0]), batch[1]).mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, stage: str = "val") -> None:
        logits = self(batch[0])
        self.scores["loss"].update(self.losses(logits.double(), batch[1]))
        self.scores["iou"].update(logits.argmax(1), batch[1].long())
        self.log_dict({f"{stage}/{name}": score for name, score in self.scores.items()})

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx, "test")

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1).byte()

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)} if self.scheduler else optimizer
