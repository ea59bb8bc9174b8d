"""A clock beside training, for advise.py: `callbacks.clock._target_=clock.Clock`."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lockstep.callbacks.meter import peak_gib


class Clock(pl.Callback):
    """Each rank writes `clock_<rank>.json` into the run's folder when training ends: `steps`, seconds of each optimizer
    step but the first; `pieces`, seconds of each micro-batch but a step's last one, whose backward pass may wait for
    other ranks; `peak_gib`, of a GPU what tensors took, else what the process took.

    Args:
        pieces: time them too. On a GPU this waits for each.
    """

    def __init__(self, pieces: bool = False) -> None:
        self.pieces = pieces
        self.ends: list[float] = []
        self.backward: list[float] = []  # when each of the step's backward passes began
        self.took: list[float] = []

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        if self.pieces:
            self.backward.append(_now(pl_module))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.ends.append(_now(pl_module))
        self.took += [end - start for start, end in pairwise(self.backward)]
        self.backward = []

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        steps = [end - start for start, end in pairwise(self.ends)]
        found = {"steps": steps, "pieces": self.took, "peak_gib": peak_gib(pl_module.device)}
        Path(trainer.default_root_dir, f"clock_{trainer.global_rank}.json").write_text(json.dumps(found))


def _now(module: pl.LightningModule) -> float:
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
    return time.perf_counter()
