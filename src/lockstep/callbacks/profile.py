"""Where a step's time goes: a few steps under torch's profiler, as a trace and as a table."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile, schedule

from lockstep.checks import whole

LOG = logging.getLogger("lockstep")


class Profile(Callback):
    """Writes `profile/trace.json` (for chrome://tracing or ui.perfetto.dev) and `profile/table.txt` of rank zero, and
    says the table. A profiled step reaches from one's end to the next's: fetching and what callbacks do is inside.

    Args:
        skip: optimizer steps before the profiled ones, at least 1: the first steps allocate, and choose kernels.
        steps: optimizer steps that are profiled.
        rows: operations in the table, those that take longest.
        folder: the run folder; None: the Trainer's `default_root_dir`.
    """

    def __init__(self, skip: int = 3, steps: int = 5, rows: int = 15, folder: str | Path | None = None) -> None:
        for name, value in (("skip", skip), ("steps", steps), ("rows", rows)):
            whole(1)(f"callbacks.profile.{name}", value)
        self.skip, self.steps, self.rows = skip, steps, rows
        self.folder = folder
        self._profiler: profile | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        folder = Path(self.folder or trainer.default_root_dir) / "profile"
        activities = [ProfilerActivity.CPU]
        if pl_module.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # Else its library talks on standard error, of GPUs that are not there too.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=self.skip - 1, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=lambda profiler: self._write(profiler, folder),
        )
        self._profiler.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
            if trainer.global_step <= self.skip:
                LOG.warning("nothing profiled: %d steps, and the first %d are skipped", trainer.global_step, self.skip)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        with contextlib.suppress(RuntimeError):
            self.on_train_end(trainer, pl_module)

    def _write(self, profiler: profile, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / "trace.json"))
        order = "self_device_time_total" if torch.cuda.is_initialized() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=self.rows, max_name_column_width=48)
        (folder / "table.txt").write_text(table + "\n")
        LOG.info("profiled: %s\n%s", folder / "trace.json", table)
