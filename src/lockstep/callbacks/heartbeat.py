"""Evaluation and prediction are progress too."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lockstep.launch.watchdog import beat


class Heartbeat(pl.Callback):
    """Tells the parent at the start and at each batch of an evaluation or prediction that this worker is alive, and how
    far; the loop does so at each micro-batch of a step."""

    def _beat(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        beat(trainer.global_step)

    on_train_start = on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _beat
