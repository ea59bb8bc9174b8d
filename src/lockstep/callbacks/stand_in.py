"""Evaluation on more processes than there are samples, without a hang and without a sample counted twice."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torchmetrics import Metric


class StandIn(pl.Callback):
    """A process without a sample evaluates one all the same, so that it joins every collective that `self.log` and
    metrics start at the evaluation's end, and then forgets it: metrics and logged means of the batch are reset."""

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._forget(trainer, pl_module, "val")

    def on_test_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._forget(trainer, pl_module, "test")

    def _forget(self, trainer: pl.Trainer, module: pl.LightningModule, split: str) -> None:
        if not trainer.datamodule.stand_in(split):  # type: ignore[attr-defined]
            return
        for part in module.modules():
            if isinstance(part, Metric):
                part.reset()
        for result in (trainer._results or {}).values():
            result.reset()
