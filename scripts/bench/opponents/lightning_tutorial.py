"""Lightning as its tutorials show it: torchvision's data set and transforms in a DataLoader, `self.log` to the progress
bar, accuracy by torchmetrics, Trainer's defaults (TensorBoard, checkpoints, progress bar).

    python scripts/bench/opponents/lightning_tutorial.py --data-dir data --workers 0 --threads 1
"""

from __future__ import annotations

import tempfile
from typing import Any

import lightning as L
import torch
import torchmetrics
from bare_loop import mnist_cnn
from torch import nn
from torch_examples import arguments, training_set
from turn_callback import Turn


class LitMNIST(L.LightningModule):
    """The module of the tutorials."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.net, self.lr = mnist_cnn(1, 28, 10), lr
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.train_acc, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)


def main() -> None:
    """Trains until nobody gives it a turn any more."""
    options = arguments()
    loader = training_set(options)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(max_epochs=options.epochs, accelerator="cpu", default_root_dir=folder, callbacks=[Turn()])
        trainer.fit(LitMNIST(options.lr), loader)


if __name__ == "__main__":
    main()
