"""A callback for rebalance.py: each rank writes when its steps end, and how many pieces it computed."""

import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl


class Pace(pl.Callback):
    """Writes `<rank>.pid`, and to `<rank>.steps` a line for each step: seconds since 1970 and pieces of this rank.

    Args:
        folder: the folder of these files.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._file: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._file = (self._folder / f"{trainer.global_rank}.steps").open("w", buffering=1)
        (self._folder / f"{trainer.global_rank}.pid").write_text(f"{os.getpid()}\n")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._file.write(f"{time.time():.6f} {len(batch.micro_batches)}\n")
