"""train.py as users run it, with one callback more: it waits for its turns. Takes train.py's arguments."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from turns import Turns

TRAIN = Path(__file__).resolve().parents[2] / "src" / "train.py"


class Turn(pl.Callback):
    """The last callback of all, so that a step's time has everything in it. Rank zero waits, the others for it."""

    def __init__(self) -> None:
        self.turns = Turns()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self.turns.begin()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.is_global_zero:
            self.turns.step(pl_module.parameters())


if __name__ == "__main__":
    sys.path.insert(0, str(TRAIN.parent))
    from lockstep.run import training

    make_callbacks = training.make_callbacks
    training.make_callbacks = lambda *args: [*make_callbacks(*args), Turn()]  # in the workers too: they are forked
    sys.argv[0] = str(TRAIN)
    runpy.run_path(sys.argv[0], run_name="__main__")
