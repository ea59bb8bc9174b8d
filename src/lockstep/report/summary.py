"""Write summary.json, the record of a run's end.

The parent writes it too and must not import torch, so imports of torch and Lightning stand in functions.
"""

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

from lockstep.checkpoint import paths
from lockstep.config.check import Config
from lockstep.config.run_length import run_length
from lockstep.files import write
from lockstep.launch.environment import environment
from lockstep.report.provenance import git_info, versions

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lockstep.data import Splits

LAYOUT = ("strategy", "accelerator", "devices", "num_nodes", "pieces", "piece_size", "batch_size", "exact")


@dataclass
class RunRecord:
    """The results of a run, from which rank zero writes summary.json.

    Attributes:
        started: `time.perf_counter()` when the run began.
        weights_hash: SHA-256 of the weights after training; in an evaluation, of the loaded weights.
        tested_step: the optimizer step at which the tested weights were saved.
    """

    config: Config
    splits: "Splits"
    folder: Path
    trainer: "pl.Trainer"
    started: float
    metrics: dict[str, float] = field(default_factory=dict)
    weights_hash: str | None = None
    tested_step: int | None = None

    def record_weights(self) -> None:
        """Store the logged metrics and the hash of the weights. Call it before a test, which loads other weights."""
        self.metrics.update(logged_metrics(self.trainer))
        self.weights_hash = weights_sha256(self.trainer.strategy.lightning_module_state_dict())

    def record_test(self) -> None:
        """Store the metrics of the test, and the step of the tested weights."""
        from lockstep.checkpoint.io import weights_in_use

        self.metrics.update(logged_metrics(self.trainer))
        self.tested_step = weights_in_use(self.trainer)[1]

    def finish(self, status: str, error: str | None) -> dict[str, Any]:
        """Write the summary on rank zero, and return it.

        Args:
            status: completed, interrupted or failed.
            error: the message of the error that ended the run; None: no error.
        """
        from lockstep.callbacks.meter import find_meter
        from lockstep.report.loggers import end_loggers

        trainer, meter = self.trainer, find_meter(self.trainer)
        summary = {
            **summarise(self.config, self.splits, self.folder, status, error, trainer.global_step),
            "epochs": trainer.current_epoch,
            "samples": self.splits.sizes,
            "metrics": self.metrics,
            "throughput": {
                "samples_per_second": meter.samples_per_second if meter else None,
                "seconds_to_first_step": meter.seconds_to_first_step if meter else None,
                "seconds": time.perf_counter() - self.started,
            },
            "weights_sha256": self.weights_hash,
            "tested_step": self.tested_step,
        }
        if trainer.is_global_zero:
            write_summary(self.folder / "summary.json", summary)
            end_loggers(trainer.loggers, status)
        return summary


def logged_metrics(trainer: "pl.Trainer") -> dict[str, float]:
    """Return the logged metrics as plain numbers; counts are int."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {name: int(value) if name.endswith(("/correct", "/count")) else value for name, value in metrics.items()}


def summarise(
    config: Config, splits: "Splits", folder: Path, status: str, error: str | None, steps: int = 0
) -> dict[str, Any]:
    """Return the summary of a run after `steps` optimizer steps, without the results of workers: they are empty."""
    layout, samples = config.layout, len(splits.train)
    epochs, step = divmod(steps, run_length(config, samples).steps_per_epoch)
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
        "steps": steps,
        "epochs": epochs,
        "samples_seen": epochs * samples + step * layout.batch_size,
        "samples": {},
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
    """Return the SHA-256 over the names and contiguous bytes of all tensors, sorted by name.

    Two hashes are equal exactly when all bits are equal. The hash does not depend on memory format, device or insertion
    order. Values that are no tensors are left out.
    """
    import torch

    sha256 = hashlib.sha256()
    for name in sorted(state_dict):
        value = state_dict[name]
        if not isinstance(value, torch.Tensor):
            continue
        sha256.update(name.encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        sha256.update(flat.view(torch.uint8).numpy().data)  # as bytes, since numpy has no bfloat16
    return sha256.hexdigest()


# --- the file ---


def summary_of(folder: Path) -> dict[str, Any]:
    """Return a run's summary; empty if there is none that can be read."""
    try:
        content = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_conclusion(
    folder: Path, status: str, error: str | None = None, known: Mapping[str, Any] | None = None
) -> None:
    """Update a run's summary with its status, its error and the entries of `known`."""
    with suppress(OSError):  # on a full disk, the error that ended the run must be reported instead
        summary = {**summary_of(folder), **(known or {}), "status": status, "error": error}
        write_summary(folder / "summary.json", summary)


def write_summary(path: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Write a summary atomically as JSON. Numbers that are not finite become null, since JSON has none."""
    text = json.dumps(_plain(summary), indent=2, allow_nan=False)
    write(path, text.encode() + b"\n")


def _plain(value: Any) -> Any:
    """Return a value as JSON data."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int) or value is None else str(value)
