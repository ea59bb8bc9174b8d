"""SIGTERM saves and ends, SIGUSR1 saves and goes on: on all ranks at the same optimizer step."""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lockstep.callbacks.checkpoint import validates
from lockstep.workers.signals import Interrupted, asked, remember

LOG = logging.getLogger("lockstep")
SECONDS = 1.0  # between two agreements


class Preemption(pl.Callback):
    """After an optimizer step the ranks agree, about once a second, whether one of them got a signal: one small
    all-reduce of CPU numbers that also settles after how many steps the next one is due.

    Args:
        folder: the run folder; the checkpoint goes to `checkpoints/last.ckpt`.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "checkpoints" / "last.ckpt"
        self.ending: int | None = None  # the signal that ends the run, once its checkpoint is saved
        self.due = self.interval = 1
        self.clock = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        signal.signal(signal.SIGTERM, remember)
        signal.signal(signal.SIGUSR1, remember)
        self.due, self.clock = trainer.global_step + 1, time.monotonic()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # all is saved; the test can be run again

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.world_size > 1:
            if trainer.global_step < self.due:
                return
            self._agree(trainer.global_step)
        if not asked:
            return
        if validates(trainer):
            self.due = trainer.global_step + 1
            return
        trainer.save_checkpoint(self.path)
        trainer.strategy.checkpoint_io.wait()  # type: ignore[attr-defined]  # until it is on the disk
        ending = next((signum for signum in asked if signum != signal.SIGUSR1), None)
        asked.clear()
        if trainer.is_global_zero:
            why = "asked to end" if ending else "SIGUSR1"  # the parent knows by what
            LOG.info(f"{why}: saved {self.path.name} after step {trainer.global_step}")
        self.ending = ending

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.ending:  # not earlier: what the module logs of a step is shown after its on_train_batch_end
            raise Interrupted(self.ending)

    def _agree(self, step: int) -> None:
        now = time.monotonic()
        flags = torch.tensor([float(signal.SIGTERM in asked), float(signal.SIGUSR1 in asked), now - self.clock])
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        end, save, seconds = flags.tolist()
        asked[:] = [signal.SIGTERM] * bool(end) + [signal.SIGUSR1] * bool(save)
        self.interval = max(1, min(1000, int(self.interval * SECONDS / max(seconds, 1e-3))))
        self.due, self.clock = step + self.interval, now
