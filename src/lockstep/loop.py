"""One optimizer step from its pieces, inside Lightning's epoch loop.

A batch that the loader yields is a `Share`: what this process computes of one optimizer step. So everything that
Lightning counts in batches (validation, logging, limits, checkpoints) counts optimizer steps, and no micro-batch is
ever seen outside this file. The only private names of Lightning that the project builds on stand here:
`_TrainingEpochLoop`, `_AutomaticOptimization` and `Closure` (how a step is made), `trainer._results` (which batch
`self.log` weights by), and `trainer._signal_connector` (who hears signals). tests/test_loop.py fails when they change.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from functools import lru_cache, partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch.optim import Optimizer

from lockstep.gradients import ExactGradientSum, GradientSum
from lockstep.heartbeat import beat
from lockstep.memory import Memory
from lockstep.nonfinite import Watch
from lockstep.plan import piece_seed
from lockstep.running_stats import RunningStats


class StepLoop(_TrainingEpochLoop):
    """Lightning's training epoch loop, with optimizer steps made of pieces.

    Args:
        gradients: how the gradients of a step's pieces are summed.
        watch: what is done about a gradient that is not finite.
        seed: the run's seed; what is random inside a piece follows from it, the step and the piece.
        memory: what is done when the device has not enough of it.
    """

    def __init__(
        self, trainer: pl.Trainer, gradients: GradientSum, watch: Watch, seed: int, memory: Memory | None = None
    ) -> None:
        super().__init__(trainer, trainer.fit_loop.min_steps, trainer.fit_loop.max_steps)
        self.automatic_optimization: StepOptimization = StepOptimization(
            trainer, gradients, watch, seed, memory or Memory(gradients.processes)
        )
        # Lightning's handler of SIGTERM broadcasts, wherever the other ranks are: they hang. Ours only remembers.
        trainer._signal_connector.register_signal_handlers = _nothing  # type: ignore[method-assign]

    def _broadcast_sigterm_tensor(self) -> None:
        """Lightning asks all ranks for a signal here, with a broadcast and a host-device sync at every batch; the
        Preemption callback does it about once a second."""


class StepOptimization(_AutomaticOptimization):
    """Forward, backward and optimizer step, over the pieces of one share."""

    def __init__(self, trainer: pl.Trainer, gradients: GradientSum, watch: Watch, seed: int, memory: Memory) -> None:
        super().__init__(trainer)
        self.gradients = gradients
        self.watch = watch
        self.seed = seed
        self.memory = memory
        self.exact = isinstance(gradients, ExactGradientSum)
        self.stats: RunningStats | None = None
        self.resumed: dict[str, Any] = {}
        self.timed: dict[int, list[float]] | None = None  # seconds of each device's turns, where somebody asks

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Under exact, the grids: the next sums round to them."""
        if not self.exact:
            return {}
        statistics = self.stats.exact.exponents if self.stats is not None and self.stats.exact is not None else []
        return {"gradients": self.gradients.state, "statistics": statistics}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        if self.exact and state_dict.get("gradients"):
            self.gradients.state = state_dict["gradients"]
            self.resumed = state_dict

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)
        backward = self._make_backward_fn(optimizer)
        return Closure(step_fn=partial(self._step, kwargs, zero_grad, backward))

    def _step(self, kwargs: OrderedDict[str, Any], zero_grad: Any, backward: Any) -> ClosureResult:
        """Gradients of the mean loss over the whole step's samples; the returned loss is this process's mean."""
        trainer, share = self.trainer, kwargs["batch"]
        strategy = trainer.strategy
        assert trainer._results is not None
        if self.stats is None:
            self.stats = RunningStats(trainer.lightning_module, strategy, self.gradients.processes, self.exact)
            if self.stats.exact is not None and self.resumed:
                self.stats.exact.exponents = list(self.resumed["statistics"])
        attempt = partial(self._turns, kwargs, lru_cache(zero_grad), backward, self.stats)  # Lightning counts zero_grad
        share, (losses, extra) = self.memory.take(trainer, share, trainer._results, self.gradients, attempt)
        self.gradients.finish(share)
        self.stats.finish(share)
        if getattr(trainer.precision_plugin, "scaler", None) is None:  # else infinities are how it finds its scale
            self.watch.look(trainer.lightning_module, share, losses)
        return ClosureResult(_mean(losses, strategy.root_device), extra=extra)

    def _turns(
        self, kwargs: OrderedDict[str, Any], zero_grad: Any, backward: Any, stats: RunningStats, share: Any
    ) -> tuple[list[tuple[torch.Tensor, int]], dict[str, Any]]:
        """The forward and backward passes of a share; returns each turn's mean loss and its samples."""
        trainer, gradients = self.trainer, self.gradients
        strategy, results = trainer.strategy, trainer._results
        assert results is not None
        losses: list[tuple[torch.Tensor, int]] = []
        extra: dict[str, Any] = {}
        stats.begin(share)
        gradients.begin(share)
        if not share.turns:
            zero_grad()
        for number, turn in enumerate(share.turns):
            beat(share.step, number)
            started = time.perf_counter()
            batch = trainer.datamodule.finish(turn)  # type: ignore[attr-defined]
            kwargs["batch"] = batch
            results.batch, results.batch_size = batch, None  # what `self.log` takes a mean's weight from
            stats.before(turn)
            seeds = [piece_seed(self.seed, share.step, piece) for piece in turn.pieces]
            with strategy.turn(turn, seeds), gradients.turn(number, share):  # type: ignore[attr-defined]
                output = self._training_step(kwargs)
                if output.closure_loss is None:
                    raise RuntimeError("training_step returned None; a piece of a step can't be left out")
                if number == 0:
                    zero_grad()
                backward(output.closure_loss * gradients.weight(turn, share))
            if self.timed is not None and number < len(share.turns) - 1:  # the last one waits for other ranks
                self._time(turn, time.perf_counter() - started)
            gradients.collect(turn)
            stats.after(turn)
            losses.append((output.closure_loss.detach(), sum(turn.sizes)))
            extra = output.extra
        kwargs["batch"] = share
        return losses, extra

    def _time(self, turn: Any, seconds: float) -> None:
        assert self.timed is not None
        device = self.trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        for number, part in getattr(self.trainer.strategy, "seconds", {turn.devices[0]: seconds}).items():
            self.timed.setdefault(number, []).append(part)


def _nothing() -> None:
    """In place of what Lightning would do."""


def _mean(losses: list[tuple[torch.Tensor, int]], device: torch.device) -> torch.Tensor:
    if not losses:
        return torch.zeros((), device=device)
    if len(losses) == 1:
        return losses[0][0]
    samples = sum(size for _, size in losses)
    return torch.stack([loss * (size / samples) for loss, size in losses]).sum()
