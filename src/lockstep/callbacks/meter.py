"""Measures a run: the means of what its steps return, speed, waiting, memory. Console and dashboard only show it."""

import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lockstep.launch.process_group import gather_objects
from lockstep.step.memory import peak_memory

GIB = float(1 << 30)
WARMUP = 10  # optimizer steps left out of `samples_per_second`, see `Speed`


class Speed:
    """How fast this process has trained so far, by a clock that stands still while something else than training runs.

    Args:
        warmup: optimizer steps that are left out (kernels are chosen, memory grows), once as many again have been made.

    Attributes:
        steps: optimizer steps counted.
    """

    def __init__(self, warmup: int = WARMUP) -> None:
        self.steps = 0
        self._warmup = warmup
        self._samples = 0
        self._end = 0.0  # when the last step ended
        self._marks: list[tuple[float, int]] = []  # clock and samples after the first step, and after the warm-up
        self._away = 0.0  # seconds not spent in training

    def now(self) -> float:
        """The clock, in seconds."""
        return time.perf_counter() - self._away

    def exclude_since(self, clock: float) -> None:
        """What has passed since the clock said so was no training: it goes back."""
        self._away += self.now() - clock

    def count(self, samples: int) -> None:
        """A step of so many samples has ended."""
        self.steps += 1
        self._samples += samples
        self._end = self.now()
        if self.steps in (1, self._warmup):
            self._marks.append((self._end, self._samples))

    @property
    def samples_per_second(self) -> float | None:
        """None before two steps."""
        if self.steps < 2:
            return None
        clock, samples = self._marks[-1] if self.steps >= 2 * self._warmup else self._marks[0]
        return (self._samples - samples) / max(self._end - clock, 1e-9)


class Meter(Callback):
    """Measures at the first step, then every `log_every`, and at an epoch's last; between, it counts on the host only.

    A measurement is the one place where the host waits for the device and the ranks talk: a single all-gather of a few
    numbers. It happens at the same step on all ranks.

    An epoch's means of what `training_step` returns, `train/loss` and the like, are logged at its end (not to the
    loggers, which get them between two measurements), and they are right after a resume in mid-epoch too. Steps that
    `nonfinite=skip` has skipped are left out.

    Args:
        log_every: optimizer steps between two measurements.
        started: `time.time()` when the command began; None: when this object was made.

    Attributes:
        latest: the last measurement by tag, the same on all ranks: `train/loss` and `train/<name>` for what else the
            first step's `training_step` returned (means over the samples since the one before),
            `workers/samples_per_second`, `workers/step_seconds`, `workers/data_wait` (seconds of one step, the slowest
            rank's), `workers/peak_gib` (largest of the ranks).
        fresh: whether the step that just ended was measured.
        samples_seen: samples trained on so far, over all ranks and resumed runs.
        seconds_to_first_step: from `started` to the end of the first optimizer step; None before it.
        edge: when, by training's own clock, the loop last turned to its loader.
    """

    changes_weights = False

    def __init__(self, log_every: int = 50, started: float | None = None) -> None:
        self.latest: dict[str, float] = {}
        self.fresh = False
        self.samples_seen = 0
        self.seconds_to_first_step: float | None = None
        self.edge = 0.0
        self._log_every = log_every
        self._started = time.time() if started is None else started
        self._next = 1  # optimizer step to be measured next
        self._before = (0.0, 0, 0)  # the measurement before: clock, samples seen, steps
        self._waited = 0.0  # seconds since then that were spent waiting for batches
        self._speed = Speed()
        self._names: list[str] = []  # of what training steps return
        self._returned: list[tuple[dict[str, Tensor], int]] = []  # by steps not yet added up, and their samples here
        self._since: dict[str, Tensor] = {}  # by name sum and weight over all ranks, since the measurement before
        self._epoch: dict[str, Tensor] = {}  # the same since the epoch began
        self._epoch_number = -1

    @property
    def samples_per_second(self) -> float | None:
        """Mean of this process's training over all ranks, without warm-up and validation; None before two steps."""
        return self._speed.samples_per_second

    def due(self, trainer: Trainer, step: int) -> bool:
        """Whether optimizer step `step` (1 is a run's first) is measured when it ends; asked in that step."""
        return step >= self._next or trainer.is_last_batch or step == trainer.max_steps

    # --- hooks ---

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._next = trainer.global_step + 1
        self.edge = self._speed.now()
        self._before = (self.edge, self.samples_seen, self._speed.steps)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.edge = self._speed.now()
        if self._epoch_number != trainer.current_epoch:  # not one that was resumed
            self._epoch, self._epoch_number = {}, trainer.current_epoch

    def exclude_seconds(self, seconds: float) -> None:
        """Leave `seconds` between two steps out of the time spent waiting for data."""
        self.edge += seconds

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._waited += self._speed.now() - self.edge

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.samples_seen += batch.samples
        if batch.num_local_samples and batch.skipped:  # what it returned counts for nothing, and may be nan
            self._returned.append(({name: torch.zeros_like(value) for name, value in outputs.items()}, 0))
        elif batch.num_local_samples:
            self._returned.append((outputs, batch.num_local_samples))
        self.fresh = self.due(trainer, trainer.global_step)
        if self.fresh:
            self._measure(trainer, pl_module)
        self._speed.count(batch.samples)
        self.edge = self._speed.now()
        if self.seconds_to_first_step is None:
            self.seconds_to_first_step = time.time() - self._started

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.device.type == "cuda":  # the last steps may still be on their way
            torch.cuda.synchronize(pl_module.device)
        self.edge = self._speed.now()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._speed.exclude_since(self.edge)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._collect(trainer, pl_module)
        # All ranks hold the same numbers. A maximum keeps them, where Lightning's mean over 3 ranks could round.
        how: dict[str, Any] = {"on_step": False, "on_epoch": True, "reduce_fx": "max", "sync_dist": True}
        means = {tag: mean.to(pl_module.device) for tag, mean in _means(self._epoch).items()}
        pl_module.log_dict(means, logger=False, **how)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._collect(trainer, pl_module)
        checkpoint["meter"] = {"samples_seen": self.samples_seen, "epoch": self._epoch_number, "sums": self._epoch}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("meter")
        if saved is not None and trainer.state.fn == "fit":
            self.samples_seen, self._epoch_number, self._epoch = (saved[k] for k in ("samples_seen", "epoch", "sums"))

    # --- measuring ---

    def _collect(self, trainer: Any, module: LightningModule, mine: Sequence[float] = ()) -> Tensor:
        """Adds up over all ranks what their steps have returned, in one all-gather with `mine`, numbers of this rank;
        returns those of all, [ranks, len(mine)]. Every rank must call it."""
        if not self._names:
            return torch.empty(0)
        sums = _weighted_sums(self._returned, self._names, module.device)
        self._returned = []
        row = torch.cat([sums.flatten(), sums.new_tensor(mine)])
        rows = trainer.strategy.all_gather(row).reshape(-1, len(row)).cpu()
        counted_rows = rows[:1] if trainer.strategy.staged else rows  # all stages return the same
        total = counted_rows[:, : sums.numel()].sum(dim=0).reshape(-1, 2)
        for running_sums in (self._since, self._epoch):
            for name, new in zip(self._names, total, strict=True):
                running_sums[name] = running_sums[name] + new if name in running_sums else new
        return rows[:, sums.numel() :]

    def _measure(self, trainer: Trainer, module: LightningModule) -> None:
        clock, samples, before = self._before
        steps = self._speed.steps + 1  # the speed counts this one when all is measured
        took = steps - before
        if not self._names:  # the first step, of which some ranks may have no sample
            names_by_rank = gather_objects([name for numbers, _ in self._returned for name in numbers])
            self._names = next(filter(None, names_by_rank), [])
        waits, memory = self._collect(trainer, module, [self._waited / took, peak_gib(module.device)]).T.tolist()
        self._before = (self._speed.now(), self.samples_seen, steps)  # after the device has caught up
        elapsed = max(self._before[0] - clock, 1e-9)
        self.latest = {
            **{tag: float(mean) for tag, mean in _means(self._since).items()},
            "workers/samples_per_second": (self.samples_seen - samples) / elapsed,
            "workers/step_seconds": elapsed / took,
            "workers/data_wait": max(waits),
            "workers/peak_gib": max(memory),
        }
        self._waited, self._since = 0.0, {}
        self._next = (trainer.global_step // self._log_every + 1) * self._log_every


def _weighted_sums(returned: list[tuple[dict[str, Tensor], int]], names: list[str], device: torch.device) -> Tensor:
    """Of each name the sum of what steps returned, each times its samples, and of these samples; float64 [names, 2].

    Nobody waits for the device: added up at each step, they would cost a small network half a per cent of it."""
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    for row, name in zip(sums, names, strict=True):
        pairs = [(numbers[name], samples) for numbers, samples in returned if name in numbers]
        if pairs:
            values = torch.stack([value for value, _ in pairs]).to(sums)
            samples = sums.new_tensor([samples for _, samples in pairs])
            row.copy_(torch.stack([values @ samples, samples.sum()]))
    return sums


def _means(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their tags and means; float64, 0-dim."""
    return {f"train/{name}": total / weight for name, (total, weight) in sums.items() if weight}


def find_meter(trainer: Any) -> Meter | None:
    """The run's Meter, if it has one."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, Meter)), None)


def peak_gib(device: torch.device) -> float:
    """Most memory that this process has used so far, in GiB: of its CUDA devices, else of the machine."""
    if device.type == "cuda":
        return (peak_memory() or 0) / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
