"""Lightning with a schedule of the learning rate, early stopping, the best checkpoint and a callback of one's own.

Written after Lightning's examples. Only the import of the Trainer is Lockstep's.

    python examples/schedule_and_callbacks.py
"""

import tempfile

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Trainer


class Regressor(pl.LightningModule):
    def __init__(self, lr=0.02):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.05), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x)[:, 0], y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x)[:, 0], y), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class History(pl.Callback):
    """Records the validation loss of each epoch."""

    def __init__(self):
        self.losses = []

    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.losses.append(float(trainer.callback_metrics["val_loss"]))


def loader(samples, generator, shuffle):
    x = torch.rand(samples, 4, generator=generator)
    y = (x[:, 0] * x[:, 1] - x[:, 2]).sin()
    return DataLoader(TensorDataset(x, y), batch_size=48, shuffle=shuffle)


def main(**options):
    pl.seed_everything(3)
    generator = torch.Generator().manual_seed(0)
    train, val = loader(480, generator, shuffle=True), loader(100, generator, shuffle=False)
    root = options.setdefault("default_root_dir", tempfile.mkdtemp())
    model, history = Regressor(), History()
    callbacks = [
        EarlyStopping("val_loss", patience=2, min_delta=1e-4),
        ModelCheckpoint(monitor="val_loss", filename="{epoch}-{val_loss:.3f}", save_top_k=2),
        LearningRateMonitor("step"),
        history,
    ]
    trainer = Trainer(
        max_epochs=6,
        accelerator="cpu",
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        callbacks=callbacks,
        logger=CSVLogger(root),
        **options,
    )
    trainer.fit(model, train, val)
    (metrics,) = trainer.validate(model, val, ckpt_path="best", verbose=False)
    return model, {**metrics, "losses": history.losses, "stopped": trainer.current_epoch}


if __name__ == "__main__":
    print(main()[1])
