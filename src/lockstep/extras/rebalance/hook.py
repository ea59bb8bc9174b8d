"""Measures what a piece takes on each rank, and deals the pieces anew where that saves time."""

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import torch
import torch.distributed as dist

from lockstep.extras.rebalance.choice import better, slowest
from lockstep.extras.rebalance.deal import MovingDeal
from lockstep.step.batch import MicroBatch
from lockstep.step.hooks import StepHook
from lockstep.step.passes import Step

LOG = logging.getLogger("lockstep")
NAMED = 8  # ranks whose pieces a line of the log lists


class RebalanceHook(StepHook):
    """Every few steps the ranks share what a piece took on each of them, and all come to the same new deal.

    A rank's time runs from the start of a step's passes to the end of its last backward pass, so it has no waiting in
    it. Under exact=true the sum of the pieces on this rank is part of it.

    Args:
        every: steps between two comparisons.
        deal: who computes which piece; it is changed.
        rank: of this process.

    Attributes:
        changes: so often have the pieces been dealt anew, since this process began.
    """

    def __init__(self, every: int, deal: MovingDeal, rank: int) -> None:
        self.every, self.deal, self.rank = every, deal, rank
        self.changes = 0
        self._clock: HostClock | CudaClock | None = None
        self._pieces_left = 0  # in this step
        self._parameters: list[torch.nn.Parameter] = []
        self._watched: set[int] = set()  # ids of those that stop the clock
        self._shown = -math.inf  # the step of the last point of the dashboard

    def before_step(self, step: Step) -> None:
        """Start the clock."""
        if self._is_full(step):
            check_loaded(step, self.deal, self.rank)
        if self._clock is None:
            device = step.strategy.root_device
            self._clock = CudaClock(self.every) if device.type == "cuda" else HostClock(self.every)
        if not step.passes.gradients.exact:
            self._watch(step)
        self._pieces_left = len(step.batch.micro_batches)
        self._clock.start()

    def after_piece(self, step: Step, micro_batch: MicroBatch) -> None:
        self._pieces_left -= 1

    def after_passes(self, step: Step) -> None:
        assert self._clock is not None
        if step.passes.gradients.exact:
            self._clock.stop()
        if self._is_full(step):
            self._clock.keep(len(step.batch.micro_batches))

    def after_optimizer_step(self, step: Step) -> None:
        if (step.number + 1) % self.every == 0:
            self._compare(step)

    def _is_full(self, step: Step) -> bool:
        """Whether the step is no short last one, whose pieces are smaller."""
        return step.batch.samples == self.deal.layout.batch_size

    def _watch(self, step: Step) -> None:
        """Have the clock stopped by the last gradient of the last piece: DDP waits for other ranks before that backward
        pass returns. Parameters may be trained from some step on."""
        self._parameters = self._parameters or list(step.module.parameters())
        for parameter in self._parameters:
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._has_gradient)

    def _has_gradient(self, parameter: Any) -> None:
        if self._pieces_left == 1 and self._clock is not None:
            self._clock.stop()

    def _compare(self, step: Step) -> None:
        """Share the times, and deal the pieces anew where that saves enough. All ranks do so alike."""
        assert self._clock is not None
        times = self._clock.times()
        mean = fmean(times) if times else math.nan
        noise = stdev(times) / len(times) ** 0.5 / mean if len(times) > 1 else 0.0
        mine = torch.tensor([mean, noise, fetched_ahead(step.trainer)], dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        seconds, noises, ahead = torch.stack(rows).T.tolist()
        counts = self.deal.layout_at(step.number).counts
        if any(map(math.isnan, seconds)) or self.deal.changes_after(step.number):
            return
        others = better(counts, seconds, max(noises))
        first = step.number + 1 + int(max(ahead))
        if others:
            self.deal.change(first, step.number, others)
            self.changes += 1
        if step.trainer.is_global_zero:
            if others:
                LOG.info(line(first + 1, counts, others, seconds))
            self._show(step, counts, seconds, changed=bool(others))

    def _show(self, step: Step, counts: Sequence[int], seconds: Sequence[float], changed: bool) -> None:
        """Write to the loggers the pieces of each rank, and the part of a step's passes that it waits for the slowest
        rank: with each change, and else as often as other curves have a point."""
        trainer, number = step.trainer, step.number + 1
        if not changed and number < self._shown + trainer.log_every_n_steps:
            return
        self._shown = -math.inf if changed else number  # what comes of a change is shown too
        longest = slowest(counts, seconds)
        shown: dict[str, float] = {}
        for rank, (count, each) in enumerate(zip(counts, seconds, strict=True)):
            shown[f"rebalance/pieces_of_rank_{rank}"] = count
            shown[f"rebalance/idle_of_rank_{rank}"] = 1 - count * each / longest
        for logger in trainer.loggers:
            logger.log_metrics(shown, number)


class HostClock:
    """Times of a CPU's passes.

    Args:
        most: steps whose times are held.
    """

    def __init__(self, most: int) -> None:
        self._times: deque[float] = deque(maxlen=(most + 1) // 2)  # the latest: a change shows sooner
        self._start = self._stop = 0.0

    def start(self) -> None:
        """At the start of a step's passes."""
        self._start = self._stop = time.perf_counter()

    def stop(self) -> None:
        """At their end; the last call counts."""
        self._stop = time.perf_counter()

    def keep(self, pieces: int) -> None:
        """Hold the step's time; it had so many pieces."""
        self._times.append((self._stop - self._start) / pieces)

    def times(self) -> list[float]:
        """Return the seconds of a piece in each step since the last call, of the latest steps only."""
        times = list(self._times)
        self._times.clear()
        return times


class CudaClock:
    """Times of a GPU's passes, by events on its stream: the host runs ahead of it, and does not wait.

    Args:
        most: steps whose times are held.
    """

    def __init__(self, most: int) -> None:
        self._events: deque[tuple[Any, Any, int]] = deque(maxlen=most)
        self._start: Any = None
        self._stop: Any = None

    def start(self) -> None:
        """At the start of a step's passes."""
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()
        self._stop.record()

    def stop(self) -> None:
        """At their end; the last call counts."""
        self._stop.record()

    def keep(self, pieces: int) -> None:
        """Hold the step's time; it had so many pieces."""
        self._events.append((self._start, self._stop, pieces))

    def times(self) -> list[float]:
        """Return the seconds of a piece in each step since the last call, of the latest that the GPU has ended."""
        ended = []
        while self._events and self._events[0][1].query():
            ended.append(self._events.popleft())
        latest = ended[len(ended) // 2 :]
        return [start.elapsed_time(stop) / 1000 / pieces for start, stop, pieces in latest]


def check_loaded(step: Step, deal: MovingDeal, rank: int) -> None:
    """Raise RuntimeError if a rank has loaded other pieces of a step than the deal says: one would be lost."""
    loaded = [micro_batch.piece for micro_batch in step.batch.micro_batches]
    right = [piece for _, piece in deal.layout_at(step.number).micro_batches(rank)]
    if loaded != right:
        raise RuntimeError(f"step {step.number + 1}: rank {rank} has loaded pieces {loaded}: must be {right}")


def fetched_ahead(trainer: Any) -> int:
    """Return how many steps after the present one loader processes may have fetched."""
    loader = trainer.train_dataloader
    return int(loader.num_workers * (loader.prefetch_factor or 0))


def line(first: int, counts: Sequence[int], others: Sequence[int], seconds: Sequence[float]) -> str:
    """Return what the log says of a change from step `first` (1-based) on, and why it is made."""
    ranks = sorted(range(len(seconds)), key=lambda rank: seconds[rank])
    fast, slow = (f"{1000 * seconds[rank]:.3g} ms on rank {rank}" for rank in (ranks[0], ranks[-1]))
    before, after = slowest(counts, seconds), slowest(others, seconds)
    return (
        f"rebalance: from step {first} on pieces {_listed(others)} instead of {_listed(counts)}, since a piece takes "
        f"{fast} and {slow}: the passes of a step take {1000 * after:.3g} ms instead of {1000 * before:.3g}"
    )


def _listed(counts: Sequence[int]) -> str:
    if len(counts) > NAMED:
        return f"{min(counts)} to {max(counts)} a rank"
    return " + ".join(map(str, counts))
