"""When a checkpoint is written, and which one is the best."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint

from lockstep.arithmetic.layout import Refusal
from lockstep.callbacks.checkpoint_io import AtomicCheckpointIO
from lockstep.callbacks.meter import aside
from lockstep.launch.atomic import same_file
from lockstep.launch.watchdog import patient
from lockstep.step.loop import StepLoop, validates

log = logging.getLogger("lockstep")


class Checkpoint(LightningCheckpoint):
    """Writes `last.ckpt` every `every` optimizer steps and at each epoch's end, after validation; and `best.ckpt`, the
    same file under another name, whenever the monitored metric improves.

    Both are written atomically, and while training goes on, by the Trainer's plugin `AtomicCheckpointIO`. Nothing is
    saved inside a step, so that no half-accumulated gradient is lost.

    Args:
        every: optimizer steps between checkpoints; None: only at an epoch's end.
        monitor: logged metric that decides about the best; None: there is no best.
        mode: `max` or `min`.
        folder: the run folder, they go to its `checkpoints/`; None: the Trainer's `default_root_dir`.
        record: plain data kept in each checkpoint under `lockstep`: config, the data's fingerprint, versions.

    Attributes:
        seconds: time that training stood still for saving, on this rank.
        saved: the step after which `last.ckpt` was written last.
    """

    def __init__(
        self,
        every: int | None = None,
        monitor: str | None = "val/acc",
        mode: str = "max",
        folder: str | Path | None = None,
        record: dict[str, Any] | None = None,
    ) -> None:
        if mode not in ("max", "min"):
            raise Refusal(f"callbacks.checkpoint.mode={mode}: must be max or min")
        if every is not None and every < 1:
            raise Refusal(f"callbacks.checkpoint.every={every}: must be a whole number of at least 1, or null")
        self.every = every
        self.monitor = monitor
        self.mode = mode
        self.folder = Path(folder) / "checkpoints" if folder is not None else None
        self.record = record or {}
        self.best_score: float | None = None
        self.seconds = 0.0
        self.saved = -1
        self._best_step = -1
        self._begun = False
        self._validated = -1  # the step after which it was done last
        self._due = False

    @property
    def last_path(self) -> Path | None:
        """The newest checkpoint, if there is one."""
        return self._existing("last.ckpt")

    @property
    def best_path(self) -> Path | None:
        """The best checkpoint, if there is one."""
        return self._existing("best.ckpt")

    def save(self, trainer: Trainer) -> None:
        """Write `last.ckpt` now. To be called on all ranks, between two optimizer steps."""
        assert self.folder is not None
        start = time.perf_counter()
        with aside(trainer):
            trainer.save_checkpoint(self.folder / "last.ckpt", weights_only=False)
        self.seconds += time.perf_counter() - start
        self.saved = trainer.global_step

    # --- hooks ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.folder is None:
            self.folder = Path(trainer.default_root_dir) / "checkpoints"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer)  # where nothing was left to train

    def _begin(self, trainer: Trainer) -> None:
        if not self._begun and self.best_score is not None:
            found = trainer.strategy.broadcast(self._recover_best(trainer) if trainer.is_global_zero else False)
            if not found:  # resumed without the file: better a new best than one that nobody has
                self.best_score, self._best_step = None, -1
        self._begun = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._due = self.every is not None and trainer.global_step % self.every == 0
        if self._due and not validates(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._validated = trainer.global_step
        # At an epoch's end we wait for on_train_epoch_end: one file then holds both, and the epoch's own metrics.
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return
        improved = self._improved(trainer)
        _follow_metrics(trainer)
        if improved or self._due:
            self.save(trainer)
        if improved:
            self._publish_best(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check_monitor(trainer)
        # What validation said of an earlier step, Lightning still shows; these weights have not earned it.
        told = self._validated == trainer.global_step or not self._by_validation
        improved = told and self._improved(trainer)
        _follow_metrics(trainer)
        self.save(trainer)
        if improved:
            self._publish_best(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        metrics = {name: torch.as_tensor(value).item() for name, value in trainer.callback_metrics.items()}
        checkpoint["lockstep"] = {**self.record, "metrics": metrics}

    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self.monitor, "mode": self.mode, "best_score": self.best_score, "best_step": self._best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if (state_dict["monitor"], state_dict["mode"]) == (
            self.monitor,
            self.mode,
        ):  # else the scores can't be compared
            self.best_score = state_dict["best_score"]
            self._best_step = state_dict["best_step"]

    # --- the best ---

    @property
    def _by_validation(self) -> bool:
        """Whether it is validation that logs the monitored metric, by its name: `val/acc`, or `val_acc`."""
        return self.monitor is not None and self.monitor.startswith("val")

    def _check_monitor(self, trainer: Trainer) -> None:
        names = sorted(trainer.callback_metrics)
        expected = self._validated >= 0 or not self._by_validation
        if self.monitor is not None and expected and self.monitor not in names:
            logged = ", ".join(names) or "nothing"
            raise Refusal(f"callbacks.checkpoint.monitor={self.monitor}: nothing logs it; logged: {logged}")

    def _improved(self, trainer: Trainer) -> bool:
        """Whether the monitored metric is the best so far; if so, it is the new best score."""
        metric = trainer.callback_metrics.get(self.monitor) if self.monitor is not None else None
        if metric is None:
            return False
        # Rank zero decides: a metric that a module did not reduce differs between ranks, and saving is collective.
        score = float(trainer.strategy.broadcast(float(torch.as_tensor(metric))))
        # Of equals the later one: with few validation samples the highest score comes early, by luck.
        better = self.best_score is None or (
            score >= self.best_score if self.mode == "max" else score <= self.best_score
        )
        if math.isnan(score) or not better:
            return False
        self.best_score, self._best_step = score, trainer.global_step
        return True

    def _publish_best(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            assert self.folder is not None
            writer = trainer.strategy.checkpoint_io
            assert isinstance(writer, AtomicCheckpointIO)
            writer.then(same_file, self.folder / "last.ckpt", self.folder / "best.ckpt")

    @patient()
    def _recover_best(self, trainer: Trainer) -> bool:
        """After a resume: find the file that belongs to `best_score`, also in the folder of the run continued."""
        assert self.folder is not None
        source = Path(trainer.ckpt_path or self.folder / "last.ckpt")
        if self._best_step != trainer.global_step:  # else it is the very checkpoint that we resumed from
            source = source.with_name("best.ckpt")
        best = self.folder / "best.ckpt"
        if source.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            same_file(source, best)
        if not best.exists():
            log.warning("best.ckpt of the run before is not beside %s: the best starts anew", source)
        return best.exists()

    def _existing(self, name: str) -> Path | None:
        path = self.folder / name if self.folder is not None else None
        return path if path is not None and path.exists() else None


def _follow_metrics(trainer: Trainer) -> None:
    if isinstance(loop := trainer.fit_loop.epoch_loop, StepLoop):
        loop.follow_metrics()
