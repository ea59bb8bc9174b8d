"""What a run says about itself when it ends: summary.json. For a parent too, which must not import torch."""

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.arithmetic.order import DataOrder
from lockstep.checkpoint import paths
from lockstep.config.check import Config
from lockstep.files import replacing
from lockstep.launch.environment import environment
from lockstep.run.provenance import git_info, versions

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lockstep.data import Splits

LAYOUT = ("strategy", "accelerator", "devices", "num_nodes", "pieces", "piece_size", "batch_size", "exact")


@dataclass
class RunRecord:
    """What a run has come to, from which rank zero writes summary.json."""

    config: Config
    splits: "Splits"
    folder: Path
    trainer: "pl.Trainer"
    started: float  # time.perf_counter()
    metrics: dict[str, float] = field(default_factory=dict)
    sha: str | None = None
    tested_step: int | None = None  # after which the tested weights were saved

    def fitted(self) -> None:
        """Takes down what testing would overwrite."""
        self.metrics.update(logged_metrics(self.trainer))
        self.sha = weights_sha256(self.trainer.strategy.lightning_module_state_dict())

    def tested(self) -> None:
        """Takes down what the test has found, and of which weights."""
        from lockstep.checkpoint.io import weights_in_use

        self.metrics.update(logged_metrics(self.trainer))
        self.tested_step = weights_in_use(self.trainer)[1]

    def finish(self, status: str, error: str | None) -> dict[str, Any]:
        """Writes the summary and returns it."""
        from lockstep.callbacks import Checkpoint
        from lockstep.run.loggers import end_loggers

        trainer = self.trainer
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        meter = next((callback for callback in callbacks if hasattr(callback, "samples_per_second")), None)
        checkpoint = next((callback for callback in callbacks if isinstance(callback, Checkpoint)), None)
        summary = {
            **summarise(self.config, self.folder, status, error),
            **progress_counts(self.config, len(self.splits.train), trainer.global_step),
            "epochs": trainer.current_epoch,
            "metrics": self.metrics,
            "throughput": {
                "samples_per_second": getattr(meter, "samples_per_second", None),
                "seconds_to_first_step": getattr(meter, "seconds_to_first_step", None),
                "seconds_saving": getattr(checkpoint, "seconds", None),
                "seconds": time.perf_counter() - self.started,
            },
            "weights_sha256": self.sha,
            "tested_step": self.tested_step,
        }
        if trainer.is_global_zero:
            write_summary(self.folder / "summary.json", summary)
            end_loggers(trainer.loggers, status)
        return summary


def logged_metrics(trainer: "pl.Trainer") -> dict[str, float]:
    """What was logged, as plain numbers; counts are whole."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {name: int(value) if name.endswith(("/correct", "/count")) else value for name, value in metrics.items()}


def progress_counts(config: Config, samples: int, steps: int) -> dict[str, int]:
    """What a summary says of `steps` optimizer steps on `samples` training samples."""
    order = DataOrder(samples, config.layout, config.seed)
    epochs, step = order.position(steps)
    return {"steps": steps, "epochs": epochs, "samples_seen": epochs * samples + step * config.layout.batch_size}


def summarise(config: Config, folder: Path, status: str, error: str | None) -> dict[str, Any]:
    """The part of a summary that is known without a worker; the rest is empty."""
    layout = config.layout
    best, last = (
        str(path.relative_to(folder)) if path.exists() else None for path in (paths.best(folder), paths.last(folder))
    )
    return {
        "status": status,
        "error": error,
        "name": config.name,
        "model": config.model.get("name"),
        "data": config.data.get("name"),
        "seed": config.seed,
        "layout": {name: getattr(layout, name) for name in LAYOUT} | {"accumulate_grad_batches": layout.accumulate},
        "steps": 0,
        "epochs": 0,
        "samples_seen": 0,
        "metrics": {},
        "throughput": {"samples_per_second": None, "seconds_to_first_step": None, "seconds": None},
        "weights_sha256": None,
        "tested_step": None,
        "best_checkpoint": best,
        "last_checkpoint": last,
        "restarts": environment().restarts,
        "versions": versions(),
        "git": git_info(),
    }


def weights_sha256(state_dict: Mapping[str, Any]) -> str:
    """SHA-256 over the names and contiguous bytes of all tensors, by sorted name: equal exactly when the bits are.

    It does not depend on memory format, device or insertion order. Extra state that is no tensor is left out.
    """
    import torch

    sha256 = hashlib.sha256()
    for name in sorted(state_dict):
        value = state_dict[name]
        if not isinstance(value, torch.Tensor):
            continue
        sha256.update(name.encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        sha256.update(flat.view(torch.uint8).numpy().data)  # through bytes, since numpy knows no bfloat16
    return sha256.hexdigest()


# --- the file ---


def summary_of(folder: Path) -> dict[str, Any]:
    """A run's summary; empty where there is none that can be read."""
    try:
        content = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_conclusion(
    folder: Path, status: str, error: str | None = None, known: Mapping[str, Any] | None = None
) -> None:
    """Says in a run's summary how it ended, and what else is `known`; the rest stays. On a full disk all does: what
    ended the run is the error to be told."""
    with suppress(OSError):
        summary = {**summary_of(folder), **(known or {}), "status": status, "error": error}
        write_summary(folder / "summary.json", summary)


def write_summary(path: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Write a summary atomically as JSON; what is not finite becomes null, since JSON has no word for it."""
    text = json.dumps(_plain(summary), indent=2, allow_nan=False)
    with replacing(path) as file:
        file.write(text.encode() + b"\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int) or value is None else str(value)
