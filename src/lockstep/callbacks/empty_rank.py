"""Evaluation on more processes than there are samples, without a hang and without a sample counted twice."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torchmetrics import Metric


class DummyBatchOnEmptyRank(pl.Callback):
    """A process without a sample evaluates one all the same, so that it joins every collective that `self.log` and
    metrics start at the evaluation's end, and then forgets it: metrics and logged means of the batch are reset."""

    def __init__(self) -> None:
        self._updates: list[tuple[Metric, int]] = []

    def _take_down(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        self._updates = [(part, part.update_count) for part in pl_module.modules() if isinstance(part, Metric)]

    def _forget(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if not trainer.datamodule.stand_in("test" if trainer.testing else "val"):  # type: ignore[attr-defined]
            return
        for metric, before in self._updates:
            if metric.update_count != before:  # others are those of the epoch that is under way
                metric.reset()
        for result in (trainer._results or {}).values():
            if not result.has_reset:  # others were logged by an evaluation before
                result.reset()
                result.has_reset = False  # else Lightning takes it for not logged, and other ranks wait for this one

    on_validation_batch_start = on_test_batch_start = _take_down
    on_validation_batch_end = on_test_batch_end = _forget
