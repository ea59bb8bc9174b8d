"""The state from which a run goes on after a worker was lost (`survive=true`): what a checkpoint has, in memory.

See `lockstep.launch.survivor`. Each worker keeps a copy of the newest state between two steps, since the weights of a
step that was under way may have changed already. Weights and optimizer state are the same on all ranks, so a copy of
any rank will do.
"""

import io
import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lockstep.checkpoint import paths
from lockstep.checkpoint.io import load_plain, step_of
from lockstep.launch.process_group import broadcast_bytes, broadcast_from_rank_zero, gather_objects
from lockstep.launch.survivor import Survivor, survivor
from lockstep.lightning.saves import SavesSteps

SHARE = 0.005  # of a run's time that copies may take
LONGEST = 100  # steps between two copies


class Snapshots(SavesSteps):
    """Copies what a checkpoint would have after a step, on all ranks.

    A copy is made after each step, or as many steps later that copies take no more than SHARE of the time. Rank zero
    decides when the next one is due.

    Args:
        worker: gets the copies.
    """

    changes_weights = False

    def __init__(self, worker: Survivor) -> None:
        self._worker = worker
        self._step = 0  # of the last copy
        self._due = 0  # the step of the next one
        self._clock = time.monotonic()  # when the last one was complete

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step, self._due, self._clock = trainer.global_step, trainer.global_step + 1, time.monotonic()

    def on_step_complete(self, trainer: Any, ends_epoch: bool) -> None:
        step = trainer.global_step
        if step < self._due:
            return
        begin = time.monotonic()
        trainer.fit_loop.epoch_loop.follow_metrics()
        content, wait = trainer.strategy.checkpoint_io.copied(trainer.checkpoint_content())
        wait()
        self._worker.state = content
        end = time.monotonic()
        of_step = (begin - self._clock) / max(1, step - self._step)
        steps = min(LONGEST, math.ceil((end - begin) / SHARE / max(of_step, 1e-6)))
        self._step, self._clock = step, end
        self._due = step + broadcast_from_rank_zero(steps)


def load_snapshot(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """Return what `load_start` does, of the newest state that a worker has in memory. All workers must call it.

    Return None if no worker has a state that is newer than the run's last checkpoint.
    """
    worker, path = survivor(), paths.last(folder)
    if worker is None or not worker.group.number:
        return None
    steps = gather_objects(-1 if worker.state is None else int(worker.state["global_step"]))
    newest = max(steps)
    if newest <= broadcast_from_rank_zero(step_of(path)):
        return None
    buffer, source = io.BytesIO(), steps.index(newest)
    if source == worker.group.rank:
        torch.save(worker.state, buffer)
    content = broadcast_bytes(bytearray(buffer.getbuffer()) or None, source)
    return str(path), load_plain(io.BytesIO(content or b""), path)
