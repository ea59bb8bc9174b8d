"""Measure a run: means of what steps return, speed, waiting time, memory. Console and dashboard show the results."""

import resource
import sys
import time
from fractions import Fraction
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lockstep.arithmetic.exact_total import ExactTotal
from lockstep.data.streams import fetch_counts
from lockstep.launch.process_group import gather_objects
from lockstep.lightning.logged_values import on_host, products
from lockstep.step.memory import peak_memory
from lockstep.step.outputs import numbers_of

GIB = float(1 << 30)
Sums = dict[str, tuple[ExactTotal, Fraction]]  # by name: the sum of value x samples, and that of the samples
WARMUP = 10  # optimizer steps that `samples_per_second` leaves out, see `Speed`


class Speed:
    """The speed of training, over all ranks, since this process began.

    Its clock stops while something other than training runs. The first WARMUP optimizer steps are left out as soon as
    there are twice as many steps, since kernels are chosen and memory grows in them.

    Attributes:
        steps: optimizer steps counted.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._samples = 0
        self._end = 0.0  # when the last step ended
        self._marks: list[tuple[float, int]] = []  # clock and samples after the first step, and after the warm-up
        self._away = 0.0  # seconds not spent in training

    def now(self) -> float:
        """Return the clock's time in seconds."""
        return time.perf_counter() - self._away

    def exclude_since(self, clock: float) -> None:
        """Set the clock back to `clock`, a time that `now` returned: what ran since then was no training."""
        self._away += self.now() - clock

    def count(self, samples: int) -> None:
        """Count an optimizer step of `samples` samples that has just ended."""
        self.steps += 1
        self._samples += samples
        self._end = self.now()
        if self.steps in (1, WARMUP):
            self._marks.append((self._end, self._samples))

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second of training; None before two steps."""
        if self.steps < 2:
            return None
        clock, samples = self._marks[-1] if self.steps >= 2 * WARMUP else self._marks[0]
        return (self._samples - samples) / max(self._end - clock, 1e-9)


class Meter(Callback):
    """Measures the first step, every `log_every`-th step and the last step of an epoch.

    At a measurement the host waits for the device, and the ranks exchange a few numbers in one all-gather. All ranks
    measure at the same steps. Between measurements nothing waits: the host only counts.

    At the end of an epoch it logs the epoch's means of what `training_step` returned, `train/loss` for example. (They
    do not go to the loggers, which get the means between two measurements.) These means are right after a resume in
    mid-epoch too. Steps that `nonfinite=skip` has skipped are left out.

    Args:
        log_every: optimizer steps between two measurements.
        started: `time.time()` when the command began; None: when this object was made.

    Attributes:
        latest: the latest measurement by tag, the same on all ranks. `train/loss`, and `train/<name>` for each other
            name that the first `training_step` returned, are means over the samples since the previous measurement.
            `workers/samples_per_second` and `workers/step_seconds` are speeds, `workers/data_wait` is the slowest
            rank's waiting time in a step, in seconds, and `workers/peak_gib` is the largest memory of a rank. If the
            data set fetches shards, `data/fetched_mb_per_second` is over all ranks, and `data/cache_hits` the share of
            shards that were there when they were read first.
        measured_steps: the first and the last step of these means; (0, 0) before the first measurement.
        just_measured: whether the step that has just ended was measured.
        samples_seen: samples trained on so far, over all ranks and resumed runs.
        seconds_to_first_step: from `started` to the end of the first optimizer step; None before it.
    """

    changes_weights = False

    def __init__(self, log_every: int = 50, started: float | None = None) -> None:
        self.latest: dict[str, float] = {}
        self.measured_steps = (0, 0)
        self.just_measured = False
        self.samples_seen = 0
        self.seconds_to_first_step: float | None = None
        self._log_every = log_every
        self._started = time.time() if started is None else started
        self._next = 1  # optimizer step to be measured next
        self._first = 1  # the step after the previous measurement
        self._before = (0.0, 0, 0)  # the previous measurement: clock, samples seen, steps
        # The time on the clock of `Speed` when the loop last asked its loader for a batch, or when validation began.
        self._wait_began = 0.0
        self._waited = 0.0  # seconds of waiting for batches since then
        self._fetches_before: list[int] = []  # see `_fetches`
        self._speed = Speed()
        self._returned: list[str] = []  # names of the numbers that the last step of this rank returned
        self._names: list[str] = []  # of those of the first step that was measured, the same on all ranks
        # For each step that is not summed yet the values of this rank's pieces, and the samples of each. Sums have no
        # rounding, so that layouts have the same bits.
        self._pieces: list[tuple[list[dict[str, Tensor]], list[int]]] = []
        self._since: Sums = {}  # of this rank, since the previous measurement
        self._local: Sums = {}  # of this rank, what `_epoch` lacks
        self._epoch: Sums = {}  # of all ranks, since the epoch began
        self._epoch_number = -1

    @property
    def samples_per_second(self) -> float | None:
        """Mean speed of all ranks since this process began, without warm-up and validation; None before two steps."""
        return self._speed.samples_per_second

    def due(self, trainer: Trainer, step: int) -> bool:
        """Check, during optimizer step `step` (a run's first is 1), whether this step is measured when it ends."""
        return step >= self._next or trainer.is_last_batch or step == trainer.max_steps

    # --- hooks ---

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._next = self._first = trainer.global_step + 1
        self._wait_began = self._speed.now()
        self._before = (self._wait_began, self.samples_seen, self._speed.steps)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wait_began = self._speed.now()
        if self._epoch_number != trainer.current_epoch:  # a resumed epoch keeps its sums
            self._epoch, self._epoch_number = {}, trainer.current_epoch
            self._pieces, self._local = [], {}

    def exclude_seconds(self, seconds: float) -> None:
        """Leave `seconds` between two steps out of the waiting time for data."""
        self._wait_began += seconds

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._waited += self._speed.now() - self._wait_began

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.samples_seen += batch.samples
        if batch.num_local_samples:
            self._returned = [*numbers_of(outputs)]
        if batch.num_local_samples and not batch.skipped:  # of a skipped step, values do not count, and may be nan
            self._pieces.append((batch.returned, [micro_batch.size for micro_batch in batch.micro_batches]))
        self.just_measured = self.due(trainer, trainer.global_step)
        if self.just_measured:
            self._measure(trainer, pl_module)
        self._speed.count(batch.samples)
        self._wait_began = self._speed.now()
        if self.seconds_to_first_step is None:
            self.seconds_to_first_step = time.time() - self._started

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.device.type == "cuda":  # the last steps may still be running
            torch.cuda.synchronize(pl_module.device)
        self._wait_began = self._speed.now()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._speed.exclude_since(self._wait_began)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._collect_epoch(trainer)
        means = {
            f"train/{name}": total.over(float(samples)) for name, (total, samples) in self._epoch.items() if samples
        }
        tensors = {tag: torch.tensor(mean, dtype=torch.float64) for tag, mean in means.items()}
        pl_module.log_dict(tensors, logger=False, on_step=False, on_epoch=True)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._collect_epoch(trainer)
        sums = {name: [hex(total.units), total.broken, str(samples)] for name, (total, samples) in self._epoch.items()}
        checkpoint["meter"] = {"samples_seen": self.samples_seen, "epoch": self._epoch_number, "sums": sums}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("meter")
        if saved is not None and trainer.state.fn == "fit":
            self.samples_seen, self._epoch_number, sums = (saved[k] for k in ("samples_seen", "epoch", "sums"))
            self._epoch = {
                name: (ExactTotal(int(units, 16), broken), Fraction(n)) for name, (units, broken, n) in sums.items()
            }

    # --- measuring ---

    def _add_pieces(self) -> None:
        """Add the values of the pieces of this rank's last steps to its sums.

        At each step, it would take half a per cent of a small network's time.
        """
        steps, self._pieces = self._pieces, []
        new: Sums = {}
        for name in dict.fromkeys(name for returned, _ in steps for numbers in returned for name in numbers):
            pairs = [
                (numbers[name], samples, numbers.get("weight") if name == "loss" else None)
                for returned, sizes in steps
                for numbers, samples in zip(returned, sizes, strict=True)
                if name in numbers
            ]
            values = on_host([value for value, *_ in pairs])
            counts: list[float] = [samples for _, samples, _ in pairs]
            if weights := [weight for *_, weight in pairs if weight is not None]:  # each loss has one, or none has
                counts = [weight * samples for weight, samples in zip(on_host(weights), counts, strict=True)]
            total = ExactTotal()
            total.add(products(counts, values))
            new[name] = total, sum(map(Fraction, counts), Fraction())
        _add(self._since, new)
        _add(self._local, new)

    def _collect_epoch(self, trainer: Any) -> None:
        """Sum over all ranks what the steps of the epoch have returned. Every rank must call it."""
        self._add_pieces()
        local, self._local = self._local, {}
        ranks = gather_objects(local)
        staged = trainer.strategy.weights == "staged"  # then all have the same values
        for of_rank in ranks[:1] if staged else ranks:
            _add(self._epoch, of_rank)

    def _fetched(self, trainer: Trainer) -> list[int]:
        """Return what `_fetches` returns, since the previous measurement."""
        now = _fetches(trainer)
        before, self._fetches_before = self._fetches_before or [0] * len(now), now
        return [number - earlier for number, earlier in zip(now, before, strict=True)]

    def _measure(self, trainer: Any, module: LightningModule) -> None:
        """Update `latest`. Every rank must call it."""
        clock, samples, steps_before = self._before
        steps = self._speed.steps + 1  # `Speed` counts the current step after the measurement
        new_steps = steps - steps_before
        if not self._names:  # it is the first step; a rank without samples has no names
            self._names = next(filter(None, gather_objects(self._returned)), [])
        fetched = self._fetched(trainer)
        self._add_pieces()
        nothing = ExactTotal(), Fraction()
        sums = [self._since.get(name, nothing) for name in self._names]
        mine = [number for total, count in sums for number in (total.over(1), float(count))]
        mine += [self._waited / new_steps, peak_gib(module.device), *fetched]
        row = torch.tensor(mine, dtype=torch.float64, device=module.device)
        rows = trainer.strategy.all_gather(row).reshape(-1, len(row)).cpu()
        staged = trainer.strategy.weights == "staged"  # then all have the same values
        counted = rows[: 1 if staged else None, : 2 * len(sums)].sum(dim=0).reshape(-1, 2).tolist()
        waits, memory, *of_shards = rows[:, 2 * len(sums) :].T.tolist()
        self._before = (self._speed.now(), self.samples_seen, steps)  # the all-gather has waited for the device
        elapsed = max(self._before[0] - clock, 1e-9)
        self.latest = {
            **{
                f"train/{name}": total / count
                for name, (total, count) in zip(self._names, counted, strict=True)
                if count
            },
            "workers/samples_per_second": (self.samples_seen - samples) / elapsed,
            "workers/step_seconds": elapsed / new_steps,
            "workers/data_wait": max(waits),
            "workers/peak_gib": max(memory),
        }
        if fetched:
            fetched_bytes, hits, misses = map(sum, of_shards)
            self.latest["data/fetched_mb_per_second"] = fetched_bytes / 1e6 / elapsed
            self.latest["data/cache_hits"] = hits / max(1, hits + misses)
        self.measured_steps, self._first = (self._first, trainer.global_step), trainer.global_step + 1
        self._waited, self._since = 0.0, {}
        self._next = (trainer.global_step // self._log_every + 1) * self._log_every


def _fetches(trainer: Trainer) -> list[int]:
    """Return the bytes, hits and waits of a data set that fetches shards, since it was opened; [] of another one."""
    splits = getattr(getattr(trainer, "datamodule", None), "splits", None)
    counts = fetch_counts(getattr(splits, "train", None))
    return [] if counts is None else [counts["bytes"], counts["hits"], counts["waits"]]


def _add(sums: Sums, more: Sums) -> None:
    """Add sums to others."""
    for name, (total, samples) in more.items():
        whole, count = sums.get(name, (ExactTotal(), Fraction()))
        whole.merge(total)
        sums[name] = whole, count + samples


def find_meter(trainer: Any) -> Meter | None:
    """Return the run's `Meter`; None if it has none.

    Args:
        trainer: the run's Trainer.
    """
    return next((callback for callback in trainer.callbacks if isinstance(callback, Meter)), None)


def peak_gib(device: torch.device) -> float:
    """Return the peak memory of this process so far in GiB: GPU memory if `device` is a GPU, else the host's memory."""
    if device.type == "cuda":
        return (peak_memory() or 0) / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # Linux reports KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
