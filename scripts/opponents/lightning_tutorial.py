"""Lightning as its tutorials show it: torchvision's data set and transforms in a DataLoader, `self.log` to the progress
bar, accuracy by torchmetrics, Trainer's defaults (TensorBoard, checkpoints, progress bar).

    python scripts/opponents/lightning_tutorial.py --data-dir data --workers 0 --threads 1
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import lightning as L
import torch
import torchmetrics
from bare_loop import mnist_cnn
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from turns import Turns


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


class Turn(L.Callback):
    """Waits for its turns."""

    def __init__(self) -> None:
        self.turns = Turns()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.turns.begin()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.turns.step(pl_module.parameters())


def main() -> None:
    """Trains until nobody gives it a turn any more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    L.seed_everything(0)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train = datasets.MNIST(options.data_dir, train=True, transform=transform)
    workers = {"num_workers": options.workers, "persistent_workers": options.workers > 0}
    loader = DataLoader(train, batch_size=options.batch_size, shuffle=True, **workers)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(max_epochs=options.epochs, accelerator="cpu", default_root_dir=folder, callbacks=[Turn()])
        trainer.fit(LitMNIST(options.lr), loader)


if __name__ == "__main__":
    main()
