"""The small convolutional net of the MNIST examples: a plain LightningModule."""

import lightning.pytorch as pl
from torch import nn
from torch.nn import functional as F

from lockstep.vision.scores import Scores, accuracy


class MnistCNN(pl.LightningModule):
    """Two convolutions and two linear layers. conf/model/mnist_cnn.yaml gives `dropout`, the run all other values."""

    task = "classification"  # data with other labels are refused before the first step

    def __init__(self, channels, image_size, num_classes, optimizer=None, scheduler=None, dropout=0.0):
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer", "scheduler"], logger=False)  # for load_from_checkpoint
        self.optimizer, self.scheduler = optimizer, scheduler
        side = (image_size - 8) // 2  # each convolution removes 4 pixels, and the pool halves the rest
        if side < 1:
            raise ValueError(f"mnist_cnn needs images of at least 10 x 10 pixels, not {image_size} x {image_size}")
        self.net = nn.Sequential(
            nn.Conv2d(channels, 20, 5),
            nn.ReLU(),
            nn.Conv2d(20, 20, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(20 * side * side, 50),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(50, num_classes),
        )
        self.scores = Scores(num_classes)  # loss and accuracy over all images of a validation or test

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "acc": accuracy(logits, y)}  # both are shown as train/...

    def validation_step(self, batch, batch_idx):
        self.log_scores("val", *batch)

    def test_step(self, batch, batch_idx):
        self.log_scores("test", *batch)

    def log_scores(self, stage, x, y):
        logits = self(x)
        self.log_dict(self.scores.of(stage, logits, y, F.cross_entropy(logits, y, reduction="none")))

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).softmax(1)

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}
