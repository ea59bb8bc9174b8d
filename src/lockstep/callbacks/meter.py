"""Measures a run: speed, waiting, memory, training loss of the last steps. Console and dashboard only show it."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lockstep.callbacks.split import PARTS, StepSplit

MOST_RANKS = 64  # more curves than that help nobody
GIB = float(1 << 30)


class Meter(Callback):
    """Counts samples and seconds at each step, on the host only; measures at the first step, then every `log_every`,
    and at an epoch's last.

    A measurement is the one place where the host waits for the device and the ranks talk: a single all-gather of a few
    numbers. It happens at the same step on all ranks. Between two of them one step is taken apart (see `StepSplit`),
    the second one, since an epoch's first fetches more and its last may be short.

    Args:
        log_every: optimizer steps between two measurements.
        log_seconds: measure earlier where `log_every` steps would take longer than this.
        warmup: optimizer steps left out of `samples_per_second` (kernels are chosen, memory grows), once as many again
            have been made.
        started: `time.time()` when the command began; None: when this object was made.

    Attributes:
        latest: the last measurement by tag, the same on all ranks: `train/loss` and `train/acc` (means over the samples
            since the one before), `throughput/samples_per_second`, `time/step` and `time/data_wait` (seconds of one
            step; the wait is the slowest rank's), `memory/peak_gib` (largest of the ranks); of the step taken apart
            `split/data_wait`, `split/compute`, `split/all_reduce` and `split/other` (seconds, of the rank that waited
            least for others); with several ranks `rank_speed/<rank>` (its samples a second of its own computing, in the
            step taken apart) and `rank_memory/<rank>` (GiB).
        fresh: whether the step that just ended was measured.
        samples_seen: samples trained on so far, over all ranks and resumed runs.
        seconds_to_first_step: from `started` to the end of the first optimizer step; None before it.
    """

    def __init__(
        self, log_every: int = 50, log_seconds: float = 30.0, warmup: int = 10, started: float | None = None
    ) -> None:
        self.log_every = log_every
        self.log_seconds = log_seconds
        self.warmup = warmup
        self.started = time.time() if started is None else started
        self.latest: dict[str, float] = {}
        self.fresh = False
        self.samples_seen = 0
        self.edge = 0.0  # when the loop last turned to its loader
        self.wait = 0.0  # seconds that the step under way has waited for its batch
        self.seconds_to_first_step: float | None = None
        self.steps = 0  # of this process
        self._away = 0.0  # seconds spent in validation: our clock stands still meanwhile
        self._left_at = 0.0
        self._next = 1  # optimizer step to be measured next
        self._wait = 0.0
        self._end = 0.0  # when the last step ended
        self._counted = 0  # samples of this process's steps: loading a checkpoint to test it moves samples_seen
        self._marks: list[tuple[float, int]] = []  # (clock, samples counted) after the first step and after the warm-up
        self._before = (0.0, 0, 0)  # the measurement before: clock, samples seen, steps
        self._losses: torch.Tensor | None = None
        self._split = StepSplit()
        self._splitting = self._split_done = False
        self._split_samples = 0

    # --- what it knows ---

    @property
    def seconds(self) -> float:
        """Since `started`."""
        return time.time() - self.started

    @property
    def samples_per_second(self) -> float | None:
        """Mean of this process's training over all ranks, without warm-up and validation; None before two steps."""
        if self.steps < 2:
            return None
        clock, samples = self._marks[-1] if self.steps >= 2 * self.warmup else self._marks[0]
        return (self._counted - samples) / max(self._end - clock, 1e-9)

    def due(self, trainer: Trainer, step: int) -> bool:
        """Whether optimizer step `step` (1 is a run's first) is measured when it ends; asked in that step."""
        return step >= self._next or trainer.is_last_batch

    # --- hooks ---

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._next = trainer.global_step + 1
        self.edge = self._clock()
        self._before = (self.edge, self.samples_seen, self.steps)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.edge = self._clock()  # skipped by Lightning when an epoch is resumed in its middle

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.wait = self._clock() - self.edge
        self._wait += self.wait
        second = self.steps == self._before[2] + 1
        if second or (not self._split_done and self.due(trainer, trainer.global_step + 1)):
            self._splitting = self._split_done = True
            self._split.begin(trainer, pl_module, self.wait)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if self._splitting:
            self._split.mark("forward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._splitting:
            self._split.mark("backward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._splitting:
            self._split.mark("all_reduce" if trainer.world_size > 1 else "other")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps += 1
        samples = _samples(batch, trainer.world_size)
        self.samples_seen += samples
        self._counted += samples
        if self._splitting:
            self._split.end()
            self._splitting, self._split_samples = False, _own_samples(batch, samples)
        if not hasattr(pl_module, "train_totals"):
            self._add_loss(outputs, _own_samples(batch, samples))
        step = trainer.global_step
        self.fresh = self.due(trainer, step)
        if self.fresh:
            self._measure(trainer, pl_module, step)
        self.edge = self._end = self._clock()
        if self.steps in (1, self.warmup):
            self._marks.append((self._end, self._counted))
        if self.seconds_to_first_step is None:
            self.seconds_to_first_step = self.seconds

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._catch_up(pl_module)
        self._left_at = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._away += time.perf_counter() - self._left_at

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._catch_up(pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"samples_seen": self.samples_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples_seen = int(state_dict["samples_seen"])

    # --- measuring ---

    def _clock(self) -> float:
        return time.perf_counter() - self._away

    def _catch_up(self, module: LightningModule) -> None:
        """On a GPU the last steps may still be on their way when the host has left them."""
        if module.device.type == "cuda" and self.steps:
            torch.cuda.synchronize(module.device)
            self._end = self._clock()

    def _add_loss(self, outputs: Any, samples: int) -> None:
        """A module without `train_totals`: the loss that `training_step` returned, weighted by its samples."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            loss = loss.detach().double().reshape(())
            row = torch.stack([loss * samples, loss.new_full((), float("nan")), loss.new_full((), samples)])
            self._losses = row if self._losses is None else self._losses + row

    def _measure(self, trainer: Trainer, module: LightningModule, step: int) -> None:
        if hasattr(module, "train_totals"):
            totals: torch.Tensor = cast(Any, module).train_totals(reset=True)
        else:
            totals = self._losses if self._losses is not None else torch.full((3,), float("nan"), device=module.device)
            self._losses = None
        clock, samples, steps = self._before
        took = max(1, self.steps - steps)
        mine = [self._wait / took, (self._clock() - clock) / took, peak_gib(module.device)]
        totals = totals.to(module.device, torch.float64)
        parts = self._split.seconds() or dict.fromkeys(PARTS, float("nan"))
        mine += [*parts.values(), self._split_samples]
        row = torch.cat([totals, totals.new_tensor(mine)])
        rows = trainer.strategy.all_gather(row).reshape(-1, len(row)).cpu()
        loss, correct, count = rows[:, :3].sum(dim=0).tolist()
        wait, _, peak = rows[:, 3:6].amax(dim=0).tolist()
        self._before = (self._clock(), self.samples_seen, self.steps)  # after the device has caught up
        elapsed = max(self._before[0] - clock, 1e-9)
        self._wait, self._split_done = 0.0, False
        latest = {
            "train/loss": loss / count if count else float("nan"),
            "train/acc": correct / count if count else float("nan"),
            "throughput/samples_per_second": (self.samples_seen - samples) / elapsed,
            "time/step": elapsed / took,
            "time/data_wait": wait,
            "memory/peak_gib": peak,
            **_taken_apart(rows[:, 5:]),
        }
        # A loss that is NaN is news; anything else that is NaN was not counted.
        self.latest = {tag: value for tag, value in latest.items() if tag == "train/loss" or value == value}
        pace = float(rows[0, 4])  # rank zero's, so that all ranks agree on the next step to measure
        soon = step + max(1, int(self.log_seconds / max(pace, 1e-9)))
        self._next = min(soon, (step // self.log_every + 1) * self.log_every)


def _taken_apart(rows: torch.Tensor) -> dict[str, float]:
    """Tags of one step from each rank's memory, seconds by part and samples, [ranks, 8]."""
    memory, samples = rows[:, 0].tolist(), rows[:, -1].tolist()
    parts = dict(zip(PARTS, rows[:, 1:-1].T, strict=True))
    compute = parts["forward"] + parts["backward"] + parts["optimizer"]
    slowest = int(parts["all_reduce"].argmin())  # the others' all-reduce is mostly waiting for this one
    shown = {**{name: parts[name] for name in ("data_wait", "all_reduce", "other")}, "compute": compute}
    found = {f"split/{name}": float(seconds[slowest]) for name, seconds in shown.items()}
    if 1 < len(rows) <= MOST_RANKS:
        own = (parts["forward"] + parts["backward"]).tolist()
        found |= {f"rank_speed/{r}": n / max(t, 1e-9) for r, (n, t) in enumerate(zip(samples, own, strict=True))}
        found |= {f"rank_memory/{rank}": gib for rank, gib in enumerate(memory)}
    return found


def find(trainer: Trainer) -> Meter | None:
    """The run's Meter, if it has one."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, Meter)), None)


@contextlib.contextmanager
def aside(trainer: Trainer) -> Iterator[None]:
    """Time in this block is not time spent waiting for data: for callbacks that write between two steps."""
    start = time.perf_counter()
    yield
    if meter := find(trainer):
        meter.edge += time.perf_counter() - start


def peak_gib(device: torch.device) -> float:
    """Most memory that this process has used so far, in GiB: of its CUDA devices, else of the machine."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())) / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def _samples(batch: Any, world_size: int) -> int:
    """Samples of the whole step: a StepBatch knows them, an ordinary batch is one rank's part."""
    samples = getattr(batch, "samples", None)
    if isinstance(samples, int):
        return samples
    while isinstance(batch, list | tuple | dict) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch) * world_size if isinstance(batch, torch.Tensor) and batch.dim() else world_size


def _own_samples(batch: Any, samples: int) -> int:
    """Weight of this rank's loss among the ranks': its samples of the step, where it knows them."""
    return int(getattr(batch, "own", samples))
