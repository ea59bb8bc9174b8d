"""Ends a run that a search finds not worth its time: the study is asked at each validation."""

from __future__ import annotations

import json
import os
from typing import Any

import lightning.pytorch as pl

from lockstep.sweeps.trial import TRIAL, Trial


class Pruned(Exception):
    """A run that other trials of its search have left behind."""


class Pruning(pl.Callback):
    """Rank zero reports the metric to the study and asks; all ranks end together.

    Args:
        told: the trial, as `lockstep.sweeps.trial.Trial` writes it.
    """

    def __init__(self, told: str) -> None:
        self.trial = Trial(**json.loads(told))
        self.reported: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:  # of a run that goes on, what the trial before it had reported
            for number, value in enumerate(self.reported, 1):
                self.trial.report(number, value)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.trial.metric not in trainer.callback_metrics:
            return
        value = float(trainer.callback_metrics[self.trial.metric])
        self.reported.append(value)
        behind = trainer.is_global_zero and self.trial.behind(len(self.reported), value)
        if trainer.strategy.broadcast(behind):
            raise Pruned(f"{self.trial.metric} {value:.4g} at validation {len(self.reported)} is behind other trials")

    def state_dict(self) -> dict[str, Any]:
        return {"reported": self.reported}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reported = list(state_dict["reported"])


def pruning() -> list[pl.Callback]:
    """The callback, in a run that a search has started."""
    return [Pruning(os.environ[TRIAL])] if TRIAL in os.environ else []
