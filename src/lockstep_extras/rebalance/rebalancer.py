"""Measure the time of a piece on each rank, and move pieces where that saves time."""

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lockstep.step.passes import StepPasses
from lockstep.step.step import Step
from lockstep_extras.rebalance.assignment import MovingAssignment
from lockstep_extras.rebalance.choice import better_counts, slowest_time

LOG = logging.getLogger("lockstep")
MOST_RANKS = 8  # a line of the log lists the pieces of at most so many ranks


class TimedPasses(StepPasses):
    """Methods for `proxy`: passes whose time is measured.

    A rank's time runs from the start of a step's passes to the last gradient of its last backward pass, so it contains
    no wait for other ranks. With exact=true it also contains the time of adding up this rank's gradients.
    """

    times: "Rebalancer"

    def compute(self, step: Step) -> None:
        self.times.begin(step)
        super().compute(step)
        self.times.end(step)

    def backward(self, step: Step, index: int) -> None:
        super().backward(step, index)
        self.times.pieces_left -= 1


class Rebalancer(Callback):
    """Compares the ranks' times every few steps and moves pieces. All ranks make the same decisions.

    Args:
        every: steps between comparisons.
        assignment: the assignment of pieces, which is changed.
        rank: this process's rank.

    Attributes:
        changes: number of changes since this process began.
        pieces_left: pieces of the step whose backward pass this rank has not run.
    """

    def __init__(self, every: int, assignment: MovingAssignment, rank: int) -> None:
        self.every, self.assignment, self.rank = every, assignment, rank
        self.changes = 0
        self._clock = CudaClock() if assignment.layout.accelerator == "gpu" else HostClock()
        self.pieces_left = 0
        self._parameters: list[torch.nn.Parameter] = []
        self._watched: set[int] = set()  # ids of the parameters that stop the clock
        self._logged = -math.inf  # step of the loggers' last point; -inf: the next comparison adds one in any case

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the loaders read which pieces this rank computes in each step from the assignment."""
        if stage == "fit":
            trainer.datamodule.assignment = self.assignment

    def begin(self, step: Step) -> None:
        """Start the clock.

        Raises:
            RuntimeError: this rank has loaded other pieces than it must compute.
        """
        if self._is_full(step):
            check_loaded(step, self.assignment, self.rank)
        if not step.gradients.exact:
            self._watch_parameters(step)
        self.pieces_left = len(step.batch.micro_batches)
        self._clock.start()

    def end(self, step: Step) -> None:
        """Record the time of the passes."""
        if step.gradients.exact:
            self._clock.stop()
        if self._is_full(step):
            self._clock.record(len(step.batch.micro_batches))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step % self.every == 0:
            self._compare(trainer, trainer.global_step - 1)

    def _is_full(self, step: Step) -> bool:
        """Check that this is not a short last step, whose pieces are smaller."""
        return step.batch.samples == self.assignment.layout.batch_size

    def _watch_parameters(self, step: Step) -> None:
        """Let the last gradient of the last piece stop the clock, because DDP waits for other ranks after it.

        Called at each step, since a parameter may become trainable later.
        """
        self._parameters = self._parameters or list(step.module.parameters())
        for parameter in self._parameters:
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._stop_clock)

    def _stop_clock(self, parameter: Any) -> None:
        if self.pieces_left == 1:
            self._clock.stop()

    def _compare(self, trainer: Any, step: int) -> None:
        """Gather the times of all ranks, and change the assignment of pieces if that saves enough."""
        times = self._clock.times()
        times = times[len(times) // 2 :]  # a change of speed shows sooner in the later half
        mean = fmean(times) if times else math.nan
        noise = stdev(times) / len(times) ** 0.5 / mean if len(times) > 1 else 0.0
        mine = torch.tensor([mean, noise, fetched_ahead(trainer)], dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        seconds, noises, ahead = torch.stack(rows).T.tolist()
        if any(map(math.isnan, seconds)) or self.assignment.changes_after(step):
            return
        counts = self.assignment.layout_at(step).counts
        new_counts = better_counts(counts, seconds, max(noises))
        if new_counts:
            first = step + 1 + int(max(ahead))
            self.assignment.change(first, step, new_counts)
            self.changes += 1
            if trainer.is_global_zero:
                LOG.info(change_line(first + 1, counts, new_counts, seconds))
        if trainer.is_global_zero:
            self._log_metrics(trainer, step + 1, counts, seconds, changed=bool(new_counts))

    def _log_metrics(
        self, trainer: Any, number: int, counts: Sequence[int], seconds: Sequence[float], changed: bool
    ) -> None:
        """Send each rank's pieces and idle share to the loggers: before and after a change, and every `log_every`."""
        if not changed and number < self._logged + trainer.log_every_n_steps:
            return
        self._logged = -math.inf if changed else number
        longest = slowest_time(counts, seconds)
        metrics: dict[str, float] = {}
        for rank, (count, each) in enumerate(zip(counts, seconds, strict=True)):
            metrics[f"rebalance/pieces_of_rank_{rank}"] = count
            metrics[f"rebalance/idle_of_rank_{rank}"] = 1 - count * each / longest
        for logger in trainer.loggers:
            logger.log_metrics(metrics, number)


class HostClock:
    """Measures the passes on a CPU."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._start = self._stop = 0.0

    def start(self) -> None:
        """Begin to measure the passes of a step."""
        self._start = self._stop = time.perf_counter()

    def stop(self) -> None:
        """End the measurement; the last call counts."""
        self._stop = time.perf_counter()

    def record(self, pieces: int) -> None:
        """Record the time of a step with `pieces` pieces on this rank."""
        self._times.append((self._stop - self._start) / pieces)

    def times(self) -> list[float]:
        """Return the seconds of a piece in each recorded step since the last call."""
        times, self._times = self._times, []
        return times


class CudaClock:
    """Measures the passes on a GPU with events on its stream, so that the host need not wait for them."""

    def __init__(self) -> None:
        self._events: deque[tuple[Any, Any, int]] = deque()
        self._start: Any = None
        self._stop: Any = None

    def start(self) -> None:
        """Begin to measure the passes of a step."""
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()
        self._stop.record()

    def stop(self) -> None:
        """End the measurement; the last call counts."""
        self._stop.record()

    def record(self, pieces: int) -> None:
        """Record the time of a step with `pieces` pieces on this rank."""
        self._events.append((self._start, self._stop, pieces))

    def times(self) -> list[float]:
        """Return the seconds of a piece in each recorded step that the GPU has completed since the last call."""
        times = []
        while self._events and self._events[0][1].query():
            start, stop, pieces = self._events.popleft()
            times.append(start.elapsed_time(stop) / 1000 / pieces)
        return times


def check_loaded(step: Step, assignment: MovingAssignment, rank: int) -> None:
    """Check that a rank has loaded the pieces of a step that it must compute.

    Raises:
        RuntimeError: it has loaded others, so that a piece would be lost.
    """
    loaded = [micro_batch.piece for micro_batch in step.batch.micro_batches]
    right = [piece for _, piece in assignment.layout_at(step.number).micro_batches(rank)]
    if loaded != right:
        raise RuntimeError(f"step {step.number + 1}: rank {rank} has loaded pieces {loaded}: must be {right}")


def fetched_ahead(trainer: Any) -> int:
    """Return how many later steps the loader processes may have fetched."""
    loader = trainer.train_dataloader
    return int(loader.num_workers * (loader.prefetch_factor or 0))


def change_line(first: int, counts: Sequence[int], new_counts: Sequence[int], seconds: Sequence[float]) -> str:
    """Return the line of the log about a change: what changes, from which step (1-based), and why."""
    ranks = sorted(range(len(seconds)), key=lambda rank: seconds[rank])
    fast, slow = (f"{1000 * seconds[rank]:.3g} ms on rank {rank}" for rank in (ranks[0], ranks[-1]))
    before, after = (f"{slowest_time(each, seconds):.3g} s" for each in (counts, new_counts))
    return (
        f"rebalance: pieces {_show(new_counts)} instead of {_show(counts)} from step {first} on: a piece takes {fast} "
        f"and {slow}, so the passes of a step take {after} instead of {before}"
    )


def _show(counts: Sequence[int]) -> str:
    if len(counts) > MOST_RANKS:
        return f"{min(counts)} to {max(counts)} a rank"
    return " + ".join(map(str, counts))
