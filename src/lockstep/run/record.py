"""What a run says about itself: the line that it starts with, and summary.json when it ends."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lockstep.arithmetic.layout import counted
from lockstep.arithmetic.order import DataOrder
from lockstep.callbacks import Checkpoint
from lockstep.callbacks.checkpoint_io import weights_in_use
from lockstep.launch.environment import environment
from lockstep.launch.watchdog import patient
from lockstep.loading import Splits
from lockstep.run.config import Config
from lockstep.run.summary import git_info, versions, weights_sha256, write_summary


def describe(config: Config, splits: Splits, steps: int, folder: Path, chosen: str = "") -> str:
    """The start-up line, with what was `chosen` for speed."""
    order = DataOrder(len(splits.train), config.batch_size, config.layout.pieces, config.seed)
    exact = ", exact" if config.exact else ""
    auto = config.accumulate_grad_batches == "auto"
    found = f", accumulate_grad_batches={config.layout.accumulate} is the least that fits" if auto else ""
    scaled = (
        f" ({config.lr_scaling} from {config.lr:g} at {config.reference_batch_size})"
        if config.lr_scaling != "none"
        else ""
    )
    shown = os.path.relpath(folder)
    where = shown if not shown.startswith("..") else folder
    epoch = f"{counted(order.steps_per_epoch, 'step')} per epoch, {steps} in all"
    return (
        f"{config.layout.describe()}{found}{exact} | {epoch} | "
        f"lr {config.step_lr:g}{scaled} | {config.precision} | {f'{chosen} | ' * bool(chosen)}{where}"
    )


@dataclass
class RunRecord:
    """The account of a run, from which rank zero writes summary.json."""

    config: Config
    splits: Splits
    folder: Path
    trainer: pl.Trainer
    started: float  # time.perf_counter()
    metrics: dict[str, float] = field(default_factory=dict)
    sha: str | None = None
    tested_step: int | None = None  # after which the tested weights were saved

    def fitted(self) -> None:
        """Takes down what testing would overwrite."""
        self.metrics.update(logged(self.trainer))
        self.sha = weights_sha256(self.trainer.strategy.lightning_module_state_dict())
        layout = self.trainer.datamodule.layout  # type: ignore[attr-defined]
        self.config = replace(self.config, layout=layout)  # memory may have run out in mid-training

    def tested(self) -> None:
        """Takes down what the test has found, and of which weights."""
        self.metrics.update(logged(self.trainer))
        self.tested_step = weights_in_use(self.trainer)[1]

    @patient()
    def finish(self, status: str, error: str | None) -> dict[str, Any]:
        """Writes the summary and returns it."""
        summary = summarise(self.config, self.folder, status, error)
        trainer = self.trainer
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        throughput = next((c for c in callbacks if hasattr(c, "samples_per_second")), None)
        checkpoint = next((c for c in callbacks if isinstance(c, Checkpoint)), None)
        summary |= {
            **progress(self.config, len(self.splits.train), trainer.global_step),
            "epochs": trainer.current_epoch,
            "metrics": self.metrics,
            "throughput": {
                "samples_per_second": getattr(throughput, "samples_per_second", None),
                "seconds_to_first_step": getattr(throughput, "seconds_to_first_step", None),
                "seconds_saving": getattr(checkpoint, "seconds", None),
                "seconds": time.perf_counter() - self.started,
            },
            "weights_sha256": self.sha,
            "tested_step": self.tested_step,
        }
        if trainer.is_global_zero:
            write_summary(self.folder / "summary.json", summary)
        return summary


def logged(trainer: pl.Trainer) -> dict[str, float]:
    """What was logged, as plain numbers; counts are whole."""
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {name: int(value) if name.endswith(("/correct", "/count")) else value for name, value in found.items()}


def progress(config: Config, samples: int, steps: int) -> dict[str, int]:
    """A summary's account of `steps` optimizer steps on `samples` training samples."""
    order = DataOrder(samples, config.batch_size, config.layout.pieces, config.seed)
    epochs, step = order.position(steps)
    return {"steps": steps, "epochs": epochs, "samples_seen": epochs * samples + step * config.batch_size}


def summarise(config: Config, folder: Path, status: str, error: str | None) -> dict[str, Any]:
    """The part of a summary that is known without a worker; the rest is empty."""
    layout = config.layout
    checkpoints = {name: folder / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")}
    found = {name: str(path.relative_to(folder)) if path.exists() else None for name, path in checkpoints.items()}
    return {
        "status": status,
        "error": error,
        "name": config.name,
        "model": config.model.get("name"),
        "data": config.data.get("name"),
        "seed": config.seed,
        "layout": {
            "strategy": layout.strategy,
            "accelerator": layout.accelerator,
            "devices": layout.devices,
            "num_nodes": layout.num_nodes,
            "accumulate_grad_batches": layout.accumulate,
            "pieces": layout.pieces,
            "piece_size": layout.piece_size,
            "batch_size": layout.batch_size,
            "exact": layout.exact,
        },
        "steps": 0,
        "epochs": 0,
        "samples_seen": 0,
        "metrics": {},
        "throughput": {"samples_per_second": None, "seconds_to_first_step": None, "seconds": None},
        "weights_sha256": None,
        "tested_step": None,
        "best_checkpoint": found["best"],
        "last_checkpoint": found["last"],
        "restarts": environment().restarts,
        "versions": versions(),
        "git": git_info(),
    }
