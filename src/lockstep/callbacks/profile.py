"""Where a step's time goes: torch's own table, and its trace of a few steps."""

import logging
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile, schedule

LOG = logging.getLogger("lockstep")


class Profile(Callback):
    """Writes of rank zero `profile/summary.txt`, the operations by their own time, and `profile/trace.json`, each of
    them in time (for ui.perfetto.dev or chrome://tracing).

    Args:
        folder: the run folder.
        skip: optimizer steps before: the first ones allocate, and choose kernels.
        steps: optimizer steps that are profiled.
        rows: operations in the table, those that take longest.
    """

    def __init__(self, folder: str | Path, skip: int = 3, steps: int = 8, rows: int = 15) -> None:
        if not all(isinstance(each, int) and each >= 1 for each in (skip, steps, rows)):
            raise ValueError(f"skip={skip}, steps={steps}, rows={rows}: must be whole numbers of at least 1")
        self._folder = Path(folder) / "profile"
        self._skip, self._steps, self._rows = skip, steps, rows
        self._profiler: profile | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        # Else its library talks on standard error, of GPUs that are not there too.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        device = [ProfilerActivity.CUDA] if pl_module.device.type == "cuda" else []
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *device],
            schedule=schedule(wait=self._skip - 1, warmup=1, active=self._steps, repeat=1),
            on_trace_ready=self._write,
        )
        self._profiler.start()

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            if (made := self._profiler.step_num - self._skip) < self._steps:
                LOG.warning("profiled %d steps, not %d: too few were made", max(0, made), self._steps)

    def _write(self, profiler: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        summary, steps = self._folder / "summary.txt", self._steps
        profiler.export_chrome_trace(str(summary.with_name("trace.json")))
        where = "device" if ProfilerActivity.CUDA in profiler.activities else "cpu"
        table = profiler.key_averages().table(sort_by=f"self_{where}_time_total", row_limit=self._rows)
        summary.write_text(f"{steps} optimizer steps\n{table}\n")
        LOG.info("profile of %d steps: %s and trace.json beside it\n%s", steps, summary, table)
