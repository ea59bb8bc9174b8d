"""A module with the interface of lightning-hydra-template's `MNISTLitModule`, and its habits: it keeps all that it is
made of in its hyperparameters, has a metric for each stage, and asks the trainer for its parameters."""

import torch
from lightning import LightningModule
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import Accuracy


class MNISTLitModule(LightningModule):
    def __init__(self, net, optimizer, scheduler, compile):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net
        self.criterion = torch.nn.CrossEntropyLoss()
        self.train_acc, self.val_acc, self.test_acc = (Accuracy(task="multiclass", num_classes=10) for _ in range(3))
        self.train_loss, self.val_loss, self.test_loss = (MeanMetric() for _ in range(3))
        self.val_acc_best = MaxMetric()

    def forward(self, x):
        return self.net(x)

    def on_train_start(self):
        for metric in (self.val_loss, self.val_acc, self.val_acc_best):
            metric.reset()

    def setup(self, stage):
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def model_step(self, batch):
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), logits.argmax(dim=1), y

    def training_step(self, batch, batch_idx):
        loss, predicted, y = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(predicted, y)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, predicted, y = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(predicted, y)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self):
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch, batch_idx):
        loss, predicted, y = self.model_step(batch)
        self.test_loss(loss)
        self.test_acc(predicted, y)
        self.log("test/loss", self.test_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        if self.hparams.scheduler is None:
            return {"optimizer": optimizer}
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        follows = {"monitor": "val/loss", "interval": "epoch", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **follows}}
