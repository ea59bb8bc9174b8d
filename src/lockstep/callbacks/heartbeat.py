"""Evaluation and prediction are progress too."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lockstep.heartbeat import beat


class Heartbeat(pl.Callback):
    """Tells the parent at each batch of an evaluation or prediction that this worker is alive; the loop does so at each
    turn of a step."""

    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        beat(trainer.global_step)

    def on_test_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        beat(trainer.global_step)

    def on_predict_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        beat(trainer.global_step)
