"""Save a checkpoint when a signal arrives, and end or continue, on all ranks at the same optimizer step.

lockstep.launch.signals has the meaning of each signal.
"""

import logging
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer

from lockstep.checkpoint import paths
from lockstep.checkpoint.callback import Checkpoint
from lockstep.launch.signals import Interrupted, ending_signals, pending_signals, record_signal, signal_handler
from lockstep.lightning.saves import SavesSteps

LOG = logging.getLogger("lockstep")
SECONDS = 1.0  # time between two all-reduces about signals


class Preemption(SavesSteps):
    """Saves when any rank got a signal.

    About once a second, after an optimizer step, a small all-reduce on the CPU shares which signals the ranks got. It
    also decides after how many steps the next one follows. If validation or an epoch's end follows the step, the
    checkpoint is saved after that.

    Args:
        folder: the run folder; the checkpoint goes to `checkpoints/last.ckpt`.
    """

    def __init__(self, folder: Path) -> None:
        self.use_folder(folder)
        self._save_due = self._end_due = False  # what all ranks have agreed on and not done yet; ending includes saving
        self._ending_signal: int = signal.SIGTERM  # the last ending signal of this rank; SIGTERM before
        self._ending: int | None = None  # the signal that ends the run, once its checkpoint is saved
        self._handlers = ExitStack()
        self._ends = set(ending_signals()) - {signal.SIGINT}  # the parent forwards Ctrl-C as SIGTERM
        self._due = self._interval = 1
        self._clock = time.monotonic()

    def use_folder(self, folder: Path) -> None:
        """Write into another run folder from now on."""
        self._path = paths.last(folder)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._handlers.enter_context(signal_handler(record_signal, *{*self._ends, signal.SIGUSR1}))
        self._due, self._clock = trainer.global_step + 1, time.monotonic()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.release_signals()  # all is saved, and a test can be repeated

    def release_signals(self) -> None:
        """Put the process's earlier handlers of signals back."""
        self._handlers.close()

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.world_size == 1 or trainer.global_step >= self._due:
            self._share_signals(trainer)

    def on_step_complete(self, trainer: Any, ends_epoch: bool) -> None:
        if self._save_due:
            self._save_for_signal(trainer)

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._ending:  # raised here, since Lightning sends a step's metrics to loggers after on_train_batch_end
            raise Interrupted(self._ending)

    def _save_for_signal(self, trainer: Any) -> None:
        """Save, unless this step is saved already, and set `_ending` if the run must end."""
        if not any(isinstance(c, Checkpoint) and c.saved == trainer.global_step for c in trainer.checkpoint_callbacks):
            trainer.fit_loop.epoch_loop.follow_metrics()
            trainer.save_checkpoint(self._path)
        trainer.strategy.checkpoint_io.wait()  # the writer thread must have finished
        self._ending = self._ending_signal if self._end_due else None
        self._save_due = self._end_due = False
        if trainer.is_global_zero:
            why = "asked to end" if self._ending else "SIGUSR1"  # the parent has the signal's name
            LOG.info(f"{why}: saved {self._path.name} after step {trainer.global_step}")

    def _share_signals(self, trainer: Trainer) -> None:
        """Decide whether to save and to end, from the signals that any rank got. Every rank must call it."""
        received = pending_signals.copy()  # later ones wait for the next call
        del pending_signals[: len(received)]
        ending = [signum for signum in received if signum in self._ends]
        if ending:
            self._ending_signal = ending[0]
        save, end = bool(received), bool(ending)
        if trainer.world_size > 1:
            save, end = self._all_reduce(save, end, trainer.global_step)
        self._save_due |= save
        self._end_due |= end

    def _all_reduce(self, save: bool, end: bool, step: int) -> tuple[bool, bool]:
        """Return whether any rank must save, and whether any must end. Set the step of the next all-reduce."""
        now = time.monotonic()
        flags = torch.tensor([float(save), float(end), now - self._clock])
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        any_saves, any_ends, seconds = flags.tolist()
        self._interval = max(1, min(1000, int(self._interval * SECONDS / max(seconds, 1e-3))))
        self._due, self._clock = step + self._interval, now
        return bool(any_saves), bool(any_ends)
