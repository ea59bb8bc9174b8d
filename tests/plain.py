"""A plain module and batches that look like a step's, for callbacks in a Trainer; and what reads their traces."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from lockstep.arithmetic.layout import Layout
from lockstep.callbacks import Checkpoint
from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint.io import AtomicCheckpointIO
from lockstep.lightning.epochs import validation_or_epoch_end_follows
from lockstep.lightning.saves import SavesSteps
from lockstep.strategies import Strategy

STEPS, SIZE = 6, 4
PATHS = ":".join([str(Path(__file__).parent), *filter(None, sys.path)])  # for programs of their own


class Clock:
    """In place of the module `time`: time that passes only where something sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    perf_counter = monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeBatch:
    """What the callbacks need of a StepBatch."""

    skipped = False

    def __init__(self, number: int, local: int = SIZE, samples: int = SIZE) -> None:
        self.num_local_samples, self.samples, self.size = local, samples, local
        self.micro_batches = [self]
        self.returned: list[dict[str, Tensor]] = []
        self.x = torch.full((SIZE, 3), float(number))
        self.y = torch.arange(SIZE) % 2

    def to(self, *args: Any, **kwargs: Any) -> "FakeBatch":
        return self


class Loader:
    """An epoch of them. A plain list would be taken for a list of loaders."""

    def __init__(self, length: int = STEPS, seconds: float = 0.0, local: tuple[int, ...] = (SIZE,)) -> None:
        self.length, self.seconds, self.local = length, seconds, local

    def __iter__(self) -> Iterator[FakeBatch]:
        for number in range(self.length):
            time.sleep(self.seconds)
            yield FakeBatch(number, self.local[number % len(self.local)])

    def __len__(self) -> int:
        return self.length


class Plain(pl.LightningModule):
    """A user's module: a loss, one validation metric, and nothing of ours."""

    scores: tuple[float, ...] = (0.5, 0.75, 0.25)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def training_step(self, batch: FakeBatch, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.layer(batch.x), batch.y)
        batch.returned = [{"loss": loss.detach()}]
        return loss

    def validation_step(self, batch: FakeBatch, batch_idx: int) -> None:
        score = self.scores[self.current_epoch % len(self.scores)]
        self.log_dict({"val/acc": score, "val/loss": 1 - score}, batch_size=1)

    def test_step(self, batch: FakeBatch, batch_idx: int) -> None:
        self.log_dict({"test/acc": 0.5, "test/count": 354.0}, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counting(Plain):
    """One whose loss at step s is s, and which returns a second number beside it."""

    def training_step(self, batch: FakeBatch, batch_idx: int) -> dict[str, Tensor]:
        zero = super().training_step(batch, batch_idx) * 0
        values = {"loss": zero + self.trainer.global_step + 1, "acc": torch.tensor(0.25)}
        batch.returned = [{name: value.detach() for name, value in values.items()}]
        return values


# A Trainer that only trains.
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class CompletesSteps(pl.callbacks.Checkpoint):
    """Tells a callback that a step is complete, as our own loop does. Lightning's does not."""

    def __init__(self, saves: SavesSteps) -> None:
        self.saves = saves

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if not validation_or_epoch_end_follows(trainer):
            self.saves.on_step_complete(trainer, ends_epoch=False)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking and not trainer.is_last_batch:
            self.saves.on_step_complete(trainer, ends_epoch=False)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.saves.on_step_complete(trainer, ends_epoch=True)


def trainer_with(tmp_path: Path, *callbacks: pl.Callback, epochs: int = 1, **options: Any) -> pl.Trainer:
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    ours = [each for each in callbacks if isinstance(each, SavesSteps)]
    usual = QUIET | {
        "enable_checkpointing": saves,
        "strategy": Strategy().build(Layout("single", "cpu", 1, 1, SIZE, 1)).strategy,
    }
    callbacks = (*callbacks, *map(CompletesSteps, ours))
    made: dict[str, Any] = {"max_epochs": epochs, "callbacks": list(callbacks), "plugins": [AtomicCheckpointIO()]}
    trainer = pl.Trainer(default_root_dir=tmp_path, **(usual | made | options))
    loop: Any = trainer.fit_loop.epoch_loop
    loop.follow_metrics = lambda: None  # no schedule here follows one
    return trainer


def loaders() -> dict[str, Any]:
    return {"train_dataloaders": Loader(), "val_dataloaders": Loader(1)}


def step_of(path: Path | None) -> int:
    assert path is not None
    return int(checkpoint_io.load(path)["global_step"])


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def board(tmp_path: Path) -> TensorBoardLogger:
    return TensorBoardLogger(tmp_path, name="", version="tensorboard", default_hp_metric=False)
