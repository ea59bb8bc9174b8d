"""When a checkpoint is written, and which one is the best."""

import difflib
import logging
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint

from lockstep.checkpoint import paths
from lockstep.checkpoint.io import weights_in_use
from lockstep.errors import UserError
from lockstep.files import same_file
from lockstep.step.lightning_quirks import validates
from lockstep.step.timing import exclude_from_timing

log = logging.getLogger("lockstep")


class Checkpoint(LightningCheckpoint):
    """Writes `last.ckpt` every `every` optimizer steps and at each epoch's end, after validation; and `best.ckpt`, the
    same file under another name, whenever the monitored metric improves.

    Both are written atomically, and while training goes on, by the Trainer's plugin `AtomicCheckpointIO`. Nothing is
    saved inside a step, so that no half-accumulated gradient is lost.

    Args:
        folder: the run folder; they go to its `checkpoints/`.
        every: optimizer steps between checkpoints; None: only at an epoch's end.
        monitor: logged metric that decides about the best; None: there is no best.
        mode: `max` or `min`.
        record: plain data kept in each checkpoint under `lockstep`: config, the data's fingerprint, versions.

    Attributes:
        monitor, mode: as given.
        best_score: the monitored metric of the best; None: there is none.
        seconds: time that training stood still for saving, on this rank.
        saved: the step after which `last.ckpt` was written last.
    """

    changes_weights = False

    def __init__(
        self,
        folder: str | Path,
        every: int | None = None,
        monitor: str | None = "val/acc",
        mode: str = "max",
        record: dict[str, Any] | None = None,
    ) -> None:
        if mode not in ("max", "min"):
            raise UserError(f"callbacks.checkpoint.mode={mode}: must be max or min")
        self.best_score: float | None = None
        self.seconds = 0.0
        self.saved = -1
        self._last, self._best = paths.last(Path(folder)), paths.best(Path(folder))
        self._every = every
        self.monitor = monitor
        self.mode = mode
        self._record = record or {}
        self._best_step = -1
        self._validated = -1  # the step after which it was done last
        self._by_validation = (monitor or "").startswith("val")  # whether that logs the metric: `val/acc`, or `val_acc`
        self._due = False

    @property
    def best(self) -> str:
        """What the best checkpoint has and since when, `val/acc 0.9912 at step 420`; empty if there is none."""
        if self.best_score is None or not self._best.exists():
            return ""
        return f"{self.monitor} {self.best_score:.4f} at step {self._best_step}"

    @property
    def best_path(self) -> Path | None:
        """The best checkpoint, if there is one."""
        return self._best if self._best.exists() else None

    def save(self, trainer: Trainer) -> None:
        """Write `last.ckpt` now. To be called on all ranks, between two optimizer steps."""
        start = time.perf_counter()
        with exclude_from_timing(trainer):
            trainer.save_checkpoint(self._last, weights_only=False)
        self.seconds += time.perf_counter() - start
        self.saved = trainer.global_step

    # --- hooks ---

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Of a run that goes on: it may have been killed before its best checkpoint had its second name."""
        if self.best_score is None:
            return
        source, step = weights_in_use(trainer)
        if _writes(trainer) and source is not None and step == self._best_step and Path(source).exists():
            same_file(source, self._best)
        if not trainer.strategy.broadcast(self._best.exists()):  # better a new best than one that nobody has
            log.warning("%s of the run before is not beside %s: the best starts anew", self._best.name, source)
            self.best_score, self._best_step = None, -1

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._due = self._every is not None and trainer.global_step % self._every == 0
        if self._due and not validates(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._validated = trainer.global_step
        # At an epoch's end we wait for on_train_epoch_end: one file then holds both, and the epoch's own metrics.
        if not trainer.is_last_batch:
            self._judge(trainer, saves=self._due)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._judge(trainer, saves=True)  # first: a run that is refused here goes on from there
        names, expected = sorted(trainer.callback_metrics), self._validated >= 0 or not self._by_validation
        if self.monitor is not None and expected and self.monitor not in names:
            raise UserError(unlogged_metric_message("callbacks.checkpoint.monitor", self.monitor, names, self.mode))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        metrics = {name: torch.as_tensor(value).item() for name, value in trainer.callback_metrics.items()}
        checkpoint["lockstep"] = {**self._record, "metrics": metrics}

    def state_dict(self) -> dict[str, Any]:
        best = {"best_score": self.best_score, "best_step": self._best_step}
        return {"monitor": self.monitor, "mode": self.mode, **best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if (state_dict["monitor"], state_dict["mode"]) == (self.monitor, self.mode):  # else scores can't be compared
            self.best_score, self._best_step = state_dict["best_score"], state_dict["best_step"]

    # --- the best ---

    def _judge(self, trainer: Any, saves: bool) -> None:
        """Saves if it `saves`, or if this is the best so far."""
        # What validation said of an earlier step, Lightning still shows; these weights have not earned it.
        validated_now = self._validated == trainer.global_step or not self._by_validation
        improved = validated_now and self._improved(trainer)
        trainer.fit_loop.epoch_loop.follow_metrics()
        if improved or saves:
            self.save(trainer)
        if improved and _writes(trainer):
            trainer.strategy.checkpoint_io.then(same_file, self._last, self._best)

    def _improved(self, trainer: Trainer) -> bool:
        """Whether the monitored metric is the best so far; if so, it is the new best score."""
        metric = trainer.callback_metrics.get(self.monitor or "")
        if metric is None:
            return False
        # Rank zero decides: a metric that a module did not reduce differs between ranks, and saving is collective.
        score = float(trainer.strategy.broadcast(float(torch.as_tensor(metric))))
        # Of equals the later one: with few validation samples the highest score comes early, by luck.
        best = score if self.best_score is None else self.best_score
        if math.isnan(score) or (score < best if self.mode == "max" else score > best):
            return False
        self.best_score, self._best_step = score, trainer.global_step
        return True


def _writes(trainer: Any) -> bool:
    """Whether this rank has the run's checkpoints, or copies of them, on its machine."""
    return bool(trainer.is_global_zero or getattr(trainer.strategy.checkpoint_io, "receives", False))


def unlogged_metric_message(key: str, metric: str, logged: Iterable[str], mode: str | None = None) -> str:
    """Return the message that nothing logs a metric, with what is logged and what to write instead.

    Args:
        key: what names the metric.
        mode: `max` or `min`, where the key has a `mode` beside it.
    """
    names = sorted(logged)
    message = f"{key}={metric}: nothing logs it; logged: {', '.join(names) or 'nothing'}"
    same_stage = [name for name in names if name.startswith("val") == metric.startswith("val")]
    near = [*difflib.get_close_matches(metric, same_stage, n=1), *same_stage]
    if not near:
        return message
    worse = mode == "max" and any(word in near[0] for word in ("loss", "err"))
    return f"{message}; give {key}={near[0]}" + f" {key.removesuffix('monitor')}mode=min" * worse
