"""Where a step's time goes: a page of text, and a trace of a few steps."""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lockstep.callbacks.meter import find
from lockstep.callbacks.split import PARTS, StepSplit
from lockstep.run.checks import whole

LOG = logging.getLogger("lockstep")
BAR = 40  # letters of a bar that is a whole step
OURS = ("ProfilerStep", "step: ")  # what stands in the trace beside operations


class Profile(Callback):
    """Writes `profile/summary.txt`, one page, and `profile/trace.json` (for ui.perfetto.dev or chrome://tracing) of
    rank zero, and says the page. To be listed below Meter, by whose clock a step waits for its data.

    The page's parts of a step (see `StepSplit`) are medians of steps that run without the profiler, which slows small
    operations down; its operations and the trace are of as many steps under it.

    Args:
        skip: optimizer steps before, at least 1: the first steps allocate, and choose kernels.
        steps: optimizer steps that are taken apart, and again as many that are profiled.
        rows: operations on the page, those that take longest.
        folder: the run folder; None: the Trainer's `default_root_dir`.
    """

    def __init__(self, skip: int = 3, steps: int = 5, rows: int = 15, folder: str | Path | None = None) -> None:
        for name, value in (("skip", skip), ("steps", steps), ("rows", rows)):
            whole(1)(f"callbacks.profile.{name}", value)
        self.skip, self.steps, self.rows = skip, steps, rows
        self.folder = folder
        self._profiler: profile | None = None
        self._split = StepSplit()
        self._taken: list[dict[str, float]] = []
        self._samples = 0
        self._page = ""
        self._range: Any = None

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
            schedule=schedule(wait=self.skip + self.steps, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=lambda profiler: self._write(profiler, trainer, folder),
        )
        self._profiler.start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._profiler is not None and self.skip <= self._profiler.step_num < self.skip + self.steps:
            meter = find(trainer)
            self._split.begin(trainer, pl_module, meter.wait if meter is not None else 0.0)
        self._name("forward")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._split.mark("forward")
        self._name("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._split.mark("backward")
        self._name("forward, or sums over ranks")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._split.mark("all_reduce" if trainer.world_size > 1 else "other")
        self._name("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._profiler is None:
            return
        self._split.end()
        if parts := self._split.seconds():
            self._taken.append(parts)
            self._samples += getattr(batch, "samples", 0)
        self._name(None)
        self._profiler.step()
        self._name("callbacks, fetching")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profiler is None:
            return
        self._name(None)
        self._profiler.stop()
        made, self._profiler = self._profiler.step_num, None  # since this start
        if self._page:
            LOG.info("%s", self._page)
        else:
            need = self.skip + 2 * self.steps + 1
            LOG.warning("nothing profiled: %d steps, at least %d are needed", made, need)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        with contextlib.suppress(RuntimeError):
            self.on_train_end(trainer, pl_module)

    def _name(self, part: str | None) -> None:
        """Begins a part of the step in the trace, and ends the one before."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if part is not None and self._profiler is not None:
            self._range = record_function(f"step: {part}")
            self._range.__enter__()

    def _write(self, profiler: profile, trainer: Trainer, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / "trace.json"))
        on_gpu = torch.cuda.is_initialized()
        events = [event for event in profiler.key_averages() if not event.key.startswith(OURS)]
        where = "device" if on_gpu else "cpu"
        times = sorted(
            ((getattr(event, f"self_{where}_time_total"), event) for event in events), key=lambda row: -row[0]
        )
        total = sum(time for time, _ in times) or 1.0
        device = "GPU" if on_gpu else "CPU"
        lines = [
            *self._parts(trainer),
            "",
            f"operations of {self.steps} steps under the profiler, by their own time on the {device}",
            "    share   ms a step   calls a step   operation",
        ]
        for time, event in times[: self.rows]:
            each = f"{time / 1000 / self.steps:10.3f}  {event.count / self.steps:13.1f}"
            lines.append(f"   {time / total:6.1%}  {each}   {event.key[:60]}")
        lines += [
            "",
            f"every operation in time: open {folder / 'trace.json'} on ui.perfetto.dev or in chrome://tracing",
        ]
        self._page = "\n".join(lines)
        (folder / "summary.txt").write_text(self._page + "\n")

    def _parts(self, trainer: Trainer) -> list[str]:
        middle = {part: statistics.median(taken[part] for taken in self._taken) for part in PARTS}
        whole_step = sum(middle.values())
        ranks = f", rank 0 of {trainer.world_size}" if trainer.world_size > 1 else ""
        lines = [
            f"a step takes {whole_step * 1000:.2f} ms, {self._samples / len(self._taken) / whole_step:,.0f} samples/s "
            f"(medians of {len(self._taken)} steps without the profiler{ranks})"
        ]
        for part, seconds in middle.items():
            step_batch = seconds / whole_step
            name = part.replace("_", " ").replace("all reduce", "all-reduce")
            lines.append(
                f"   {step_batch:6.1%}  {seconds * 1000:10.3f} ms   {name:<10} {'#' * round(step_batch * BAR)}"
            )
        if trainer.world_size > 1:
            lines.append("   all-reduce: what sums over ranks add to the step, waiting for slower ranks included")
        return lines
