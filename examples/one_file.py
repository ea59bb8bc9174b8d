"""Lockstep in one file: one step of 60 samples in 6 pieces, on any layout, to the same bits.

    python examples/one_file.py                                # one device, 6 pieces one after the other
    python examples/one_file.py --strategy dp --devices 2      # one process, two devices
    python examples/one_file.py --devices 3                    # three processes
    torchrun --nproc-per-node=2 examples/one_file.py           # two, started by torchrun

All print the same SHA-256 of the weights; another `--seed` prints another one. Kill one of them, and start another one
with `--resume` in the same folder: it continues from the last epoch, to the same SHA-256.
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Net(pl.LightningModule):
    """A small network with what usually depends on the layout: BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(arguments):
    """Train, and return the SHA-256 of the weights. Every worker runs this function."""
    pl.seed_everything(0)  # the initial weights, and the samples
    x = torch.randn(500, 8)
    data = lockstep.DataModule(train=TensorDataset(x, (x[:, :3] + x[:, 3:6]).argmax(1)))
    module, layout = Net(), {"strategy": arguments.strategy, "devices": arguments.devices}
    trainer = lockstep.Trainer(
        batch_size=60, pieces=6, exact=True, seed=arguments.seed, max_epochs=3, accelerator="cpu", **layout
    )
    trainer.fit(module, data, ckpt_path="last" if arguments.resume else None)
    return lockstep.weights_sha256(module.state_dict())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    workers = 1 if arguments.strategy == "dp" else arguments.devices
    print(lockstep.launch(train, arguments, devices=workers, accelerator="cpu"))
