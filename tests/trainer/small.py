"""A small module and its data for tests of `lockstep.Trainer`."""

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import lockstep

# autograd decides at the first backward pass of a process, by its devices, whether forks may compute gradients too: not
# after a test has made it see a GPU
torch.ones(1, requires_grad=True).sum().backward()
SAMPLES, BATCH = 132, 24  # the last step has twelve samples
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 2,
}
LAYOUTS: dict[str, dict[str, Any]] = {"one": {"pieces": 4}, "dp": {"pieces": 4, "strategy": "dp", "devices": 3}}


class Net(pl.LightningModule):
    """A network with what depends on the layout if nothing is done about it: BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean_x", batch[0].mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        x: Tensor = batch[0]
        return x

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def samples() -> TensorDataset:
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, :3] + 0.5 * x[:, 3:6]).argmax(1))


NUMBERS = {value: index for index, value in enumerate(samples().tensors[0][:, 0].tolist())}


def numbers(batch: Any) -> list[int]:
    """Return which samples a batch has."""
    return [NUMBERS[value] for value in batch[0][:, 0].tolist()]


class Seen(Net):
    """Records which samples each epoch has, and each batch of an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.trained: list[list[int]] = []
        self.evaluated: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(self.trained) <= self.current_epoch:
            self.trained.append([])
        self.trained[-1] += numbers(batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated.append(numbers(batch))
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated.append(numbers(batch))
        super().test_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.evaluated.append(numbers(batch))
        return super().predict_step(batch, batch_idx)


class Data(pl.LightningDataModule):
    """Splits its samples by torch's global random numbers, as many do."""

    classes = ("a", "b", "c")

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, **options}
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append("setup " + stage)
        self.train, self.val = random_split(samples(), [102, 30])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, **self.options)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=7)

    def teardown(self, stage: str) -> None:
        self.calls.append("teardown " + stage)


class Killed(pl.Callback):
    """Kills this process before its tenth step, when the checkpoints of earlier ones are written."""

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 9:
            checkpoint_io: Any = trainer.strategy.checkpoint_io
            checkpoint_io.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(folder: Path, **options: Any) -> lockstep.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return lockstep.Trainer(default_root_dir=folder, **{**QUIET, **options})


def lines_of_lockstep(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what Lockstep alone has written: another test may let Lightning write its own lines."""
    return [record.getMessage() for record in caplog.records if record.name == "lockstep"]


def fit(folder: Path, *data: Any, kind: Callable[[], Any] = Net, ckpt_path: Any = None, **options: Any) -> str:
    """Fit and return the SHA-256 of the weights."""
    pl.seed_everything(0, verbose=False)
    module = kind()
    made: Any = trainer(folder, **options)
    made.fit(module, *(data or [loader()]), ckpt_path=ckpt_path)
    return lockstep.weights_sha256(module.state_dict())


def saved_steps(folder: Path) -> ModelCheckpoint:
    """Return a callback that writes a checkpoint `step=<n>.ckpt` after each step."""
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(samples(), **{"batch_size": BATCH, "shuffle": True, **options})
