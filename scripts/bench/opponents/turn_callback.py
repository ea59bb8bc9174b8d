"""A training loop of Lightning's as a player: `callbacks.turns._target_=turn_callback.Turn`."""

from __future__ import annotations

import lightning.pytorch as pl
from turns import Turns


class Turn(pl.Callback):
    """Rank zero waits for its turns, the others for it."""

    def __init__(self) -> None:
        self.turns = Turns()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self.turns.begin()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: object) -> None:
        if trainer.is_global_zero:
            self.turns.step(pl_module.parameters())
