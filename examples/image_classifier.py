"""An image classifier with Lightning: a module, two loaders, a Trainer. Handwritten digits, which scikit-learn brings.

Written after Lightning's introductory examples. Only the import of the Trainer is Lockstep's.

    python examples/image_classifier.py
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch import seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from lockstep import Trainer


class ImageClassifier(pl.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(8 * 4 * 4, 10),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_acc", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


def main(**options):
    seed_everything(1)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train, val, test = random_split(dataset, [1400, 150, 247])

    model = ImageClassifier()
    trainer = Trainer(max_epochs=2, accelerator="cpu", **options)
    trainer.fit(model, DataLoader(train, batch_size=56, shuffle=True), DataLoader(val, batch_size=56))
    (metrics,) = trainer.test(model, DataLoader(test, batch_size=56), verbose=False)
    return model, metrics


if __name__ == "__main__":
    print(main()[1])
