"""Lightning with a LightningDataModule and torchmetrics: accuracy and a confusion matrix over all samples.

Written after Lightning's and torchmetrics' examples. Only the import of the Trainer is Lockstep's.

    python examples/datamodule_and_metrics.py
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, random_split
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

from lockstep import Trainer


class Digits(Dataset):
    """The digits, each shifted by a random number of pixels in training."""

    def __init__(self, augment=False):
        digits = load_digits()
        self.images, self.targets = torch.tensor(digits.images, dtype=torch.float32) / 16, digits.target.tolist()
        self.augment = augment

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:
            image = image.roll(int(torch.randint(-1, 2, ())), dims=1)
        return {"image": image[None], "label": self.targets[index]}


class DigitsDataModule(pl.LightningDataModule):
    num_classes = 10

    def __init__(self, batch_size=64):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        load_digits()

    def setup(self, stage):
        sizes = [1500, 297]
        self.train, _ = random_split(Digits(augment=True), sizes, torch.Generator().manual_seed(42))
        _, self.val = random_split(Digits(), sizes, torch.Generator().manual_seed(42))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def predict_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)


class LitDigits(pl.LightningModule):
    def __init__(self, num_classes):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_classes))
        self.train_acc = MulticlassAccuracy(num_classes, average="micro")
        metrics = MetricCollection([MulticlassAccuracy(num_classes), MulticlassF1Score(num_classes)])
        self.val_metrics, self.test_metrics = metrics.clone(prefix="val_"), metrics.clone(prefix="test_")
        self.confusion = MulticlassConfusionMatrix(num_classes)

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["image"])
        self.train_acc(logits, batch["label"])
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, batch["label"])

    def validation_step(self, batch, batch_idx):
        self.val_metrics.update(self.net(batch["image"]), batch["label"])
        self.log_dict(self.val_metrics)

    def test_step(self, batch, batch_idx):
        logits = self.net(batch["image"])
        self.test_metrics.update(logits, batch["label"])
        self.confusion.update(logits, batch["label"])
        self.log_dict(self.test_metrics)

    def on_test_epoch_end(self):
        self.log("test_confused", self.confusion.compute().fill_diagonal_(0).sum().float())
        self.confusion.reset()

    def predict_step(self, batch, batch_idx):
        return self.net(batch["image"]).argmax(1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main(**options):
    pl.seed_everything(7)
    data = DigitsDataModule(batch_size=60)
    model = LitDigits(data.num_classes)
    trainer = Trainer(max_epochs=3, accelerator="cpu", **options)
    trainer.fit(model, datamodule=data)
    (metrics,) = trainer.test(model, datamodule=data, verbose=False)
    return model, metrics


if __name__ == "__main__":
    print(main()[1])
