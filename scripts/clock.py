"""A clock beside training, for programs that measure runs: `callbacks.clock._target_=clock.Clock`."""

from __future__ import annotations

import json
import resource
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch


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
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
        if pl_module.device.type == "cuda":
            peak = max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))) / (1 << 30)
        steps = [end - start for start, end in pairwise(self.ends)]
        path = Path(trainer.default_root_dir, f"clock_{trainer.global_rank}.json")
        path.write_text(json.dumps({"steps": steps, "pieces": self.took, "peak_gib": peak}))


def read(folder: Path) -> list[dict[str, Any]]:
    """What each rank has written, rank zero first."""
    return [json.loads((folder / f"clock_{n}.json").read_text()) for n in range(len([*folder.glob("clock_*.json")]))]


def _now(module: pl.LightningModule) -> float:
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
    return time.perf_counter()
