"""One optimizer step from its pieces, inside Lightning's epoch loop.

A batch that the loader yields is a `Share`: what this process computes of one optimizer step. So everything that
Lightning counts in batches (validation, logging, limits, checkpoints) counts optimizer steps, and no micro-batch is
ever seen outside this file. The only private names of Lightning that the project builds on stand here and in
hooks.py: `_TrainingEpochLoop`, `_AutomaticOptimization` and `Closure` (how a step is made), its `_results` and
`trainer._logger_connector` (what `self.log` needs), and `trainer._signal_connector` (who hears signals).
tests/test_loop.py fails when they change.

Lightning's own path through a step costs 0.6 ms, which a small network feels. Where nobody needs what it offers
(`hooks.lean`), the same calls are made from here, to the same effect: a third of that.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch.optim import Optimizer

from lockstep.gradients import ExactGradientSum, GradientSum
from lockstep.heartbeat import beat
from lockstep.hooks import Hooks, lean, overrides
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

        self.lean = False
        self.hooks: Hooks
        self._validates: bool | None = None  # whether this epoch does

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """An epoch that `max_steps` has cut short goes on: Lightning has counted it, and would leave the rest out."""
        super().on_load_checkpoint(state_dict)
        plan, epochs = self.trainer.datamodule.plan, self.trainer.fit_loop.epoch_progress  # type: ignore[attr-defined]
        if self.batch_progress.current.completed < plan.steps_per_epoch:
            for count in (epochs.current, epochs.total):
                count.processed = count.completed

    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)
        self._batches_that_stepped = self.global_step
        self.lean = lean(self.trainer)
        self._validates = super()._should_check_val_epoch()
        self.hooks = self.automatic_optimization.hooks = Hooks(self.trainer)

    def advance(self, data_fetcher: Any) -> None:
        """One batch: Lightning's `advance`, without what nobody asked for.

        Raises:
            StopIteration: no batch is left, or the module's `on_train_batch_start` returned -1.
        """
        if self.restarting or not self.lean:
            lean, self.lean = self.lean, False
            try:
                super().advance(data_fetcher)
            finally:
                self.lean = lean
            return
        trainer, hooks, progress = self.trainer, self.hooks, self.batch_progress
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if self.val_loop.restarting:
            self.val_loop.restarting = False
        batch, _, _ = next(data_fetcher)
        number = self.batch_idx + 1
        progress.is_last_batch = data_fetcher.done
        batch = data.transfer_batch_to_device(batch, trainer.strategy.root_device, 0)
        progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        if hooks("on_train_batch_start", batch, number) == -1:
            progress.increment_by(0, is_last_batch=True)
            progress.increment_processed()
            self._schedule()
            raise StopIteration
        progress.increment_started()
        outputs = self.automatic_optimization.step(batch, number)
        progress.increment_processed()
        self._schedule()
        hooks("on_train_batch_end", outputs, batch, number)
        results = self._results
        logs = any(result.meta.on_step for result in results.values())
        if logs:
            trainer._logger_connector.on_batch_end()
        results.batch = results.batch_size = None
        progress.increment_completed()
        if logs:
            trainer._logger_connector.update_train_step_metrics()

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Lightning counts a step after its validation, and so shows that one step early: where a run was killed in
        between and resumed, the lost validation would stay beside the new one."""
        self._batches_that_stepped = self.global_step
        super().on_advance_end(data_fetcher)
        self._batches_that_stepped = self.global_step

    @property
    def global_step(self) -> int:
        return self.automatic_optimization.optim_progress.optimizer_steps

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        if not self.lean:  # else `_schedule` has
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _should_accumulate(self) -> bool:
        """Never over batches: every one is a whole step."""
        return False

    def _should_check_val_epoch(self) -> bool:
        return super()._should_check_val_epoch() if self._validates is None else self._validates

    def _schedule(self) -> None:
        """Learning rates of the next step; an epoch's last step also moves what counts in epochs."""
        module, ended = self.trainer.lightning_module, self._num_ready_batches_reached()
        for config in self.trainer.lr_scheduler_configs:
            by_step = config.interval == "step"
            passed = self.batch_idx if by_step else self.trainer.current_epoch
            if (by_step or ended) and (passed + 1) % config.frequency == 0:
                self.scheduler_progress.increment_ready()
                module.lr_scheduler_step(config.scheduler, None)
                self.scheduler_progress.increment_completed()

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
        self.graphs = False  # whether networks run as CUDA graphs, whose tensors the next run overwrites
        self.hooks: Hooks
        self._indexed: bool | None = None  # whether `training_step` takes the batch's number
        self._clips = False
        self._zeroed = False

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Under exact, the grids: the next sums round to them."""
        self.watch.settle()
        if not self.exact:
            return {}
        statistics = self.stats.exact.exponents if self.stats is not None and self.stats.exact is not None else []
        return {"gradients": self.gradients.state, "statistics": statistics}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        if self.exact and state_dict.get("gradients"):
            self.gradients.state = state_dict["gradients"]
            self.resumed = state_dict

    def step(self, batch: Any, number: int) -> dict[str, Any]:
        """A whole optimizer step, as `run` makes it; returns what `training_step` did."""
        trainer, hooks, progress = self.trainer, self.hooks, self.optim_progress.optimizer
        optimizer, module = trainer.optimizers[0], trainer.lightning_module
        if self._indexed is None:
            kwargs = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, number)
            self._indexed = "batch_idx" in kwargs
            own = overrides(module, "configure_gradient_clipping", pl.LightningModule)
            self._clips = own or trainer.gradient_clip_val is not None
        kwargs = OrderedDict(batch=batch, batch_idx=number) if self._indexed else OrderedDict(batch=batch)
        found: list[tuple[torch.Tensor, dict[str, Any]]] = []

        def zero_grad() -> None:
            progress.zero_grad.increment_ready()
            hooks("on_before_zero_grad", optimizer)
            progress.zero_grad.increment_started()
            module.optimizer_zero_grad(trainer.current_epoch, number, optimizer)
            progress.zero_grad.increment_completed()

        def closure() -> torch.Tensor | None:
            found.append(self._step(kwargs, zero_grad, self._backward))
            hooks("on_before_optimizer_step", optimizer)
            if self._clips:
                limit = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
                module.configure_gradient_clipping(optimizer, *limit)
            return found[-1][0]

        progress.step.increment_ready()
        optimizer.step(closure)  # type: ignore[arg-type]  # torch only hands on what it returns
        progress.step.increment_completed()
        loss, extra = found[-1]
        return {"loss": loss, **extra}

    def _forward(self, kwargs: OrderedDict[str, Any]) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """The loss of a batch, with its graph, and what else `training_step` returned."""
        if self.trainer.fit_loop.epoch_loop.lean:  # type: ignore[attr-defined]
            output = self.hooks.within("training_step", self.trainer.strategy.training_step, *kwargs.values())
            if isinstance(output, torch.Tensor):
                return output, {}
            result = ClosureResult.from_training_step_output(output)
        else:
            result = self._training_step(kwargs)
        return result.closure_loss, result.extra

    def _backward(self, loss: torch.Tensor) -> None:
        strategy = self.trainer.strategy
        strategy.pre_backward(loss)
        self.hooks("on_before_backward", loss)
        self.trainer.lightning_module.backward(loss)
        self.hooks("on_after_backward")
        strategy.post_backward(loss)

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)
        backward = self._make_backward_fn(optimizer)

        def step() -> ClosureResult:
            loss, extra = self._step(kwargs, zero_grad, backward)
            return ClosureResult(loss, extra=extra)

        return Closure(step_fn=step)

    def _step(
        self, kwargs: OrderedDict[str, Any], zero_grad: Any, backward: Any
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Gradients of the mean loss over the whole step's samples; the returned loss is this process's mean."""
        trainer, share = self.trainer, kwargs["batch"]
        strategy = trainer.strategy
        results = trainer.fit_loop.epoch_loop._results
        if self.stats is None:
            self.stats = RunningStats(trainer.lightning_module, strategy, self.gradients.processes, self.exact)
            if self.stats.exact is not None and self.resumed:
                self.stats.exact.exponents = list(self.resumed["statistics"])
        attempt = partial(self._turns, kwargs, zero_grad, backward, self.stats)
        self._zeroed = False
        share, (losses, extra) = self.memory.take(trainer, share, results, self.gradients, attempt)
        self.gradients.finish(share)
        self.stats.finish(share)
        if getattr(trainer.precision_plugin, "scaler", None) is None:  # else infinities are how it finds its scale
            self.watch.look(trainer.lightning_module, trainer.optimizers[0], share, losses)
            if trainer.is_last_batch or trainer.global_step + 1 == trainer.max_steps:
                self.watch.settle()
        return _mean(losses, strategy.root_device), extra

    def _turns(
        self, kwargs: OrderedDict[str, Any], zero_grad: Any, backward: Any, stats: RunningStats, share: Any
    ) -> tuple[list[tuple[torch.Tensor, int]], dict[str, Any]]:
        """The forward and backward passes of a share; returns each turn's mean loss and its samples."""
        trainer, gradients = self.trainer, self.gradients
        strategy, results = trainer.strategy, trainer.fit_loop.epoch_loop._results
        losses: list[tuple[torch.Tensor, int]] = []
        extra: dict[str, Any] = {}
        stats.begin(share)
        gradients.begin(share)
        if not share.turns:
            self._zero_once(zero_grad)
        for number, turn in enumerate(share.turns):
            beat(share.step, number)
            if self.graphs:
                torch.compiler.cudagraph_mark_step_begin()
            started = time.perf_counter()
            batch = trainer.datamodule.finish(turn)  # type: ignore[attr-defined]
            kwargs["batch"] = batch
            results.batch, results.batch_size = batch, None  # what `self.log` takes a mean's weight from
            stats.before(turn)
            seeds = [piece_seed(self.seed, share.step, piece) for piece in turn.pieces]
            with strategy.turn(turn, seeds), gradients.turn(number, share):  # type: ignore[attr-defined]
                loss, extra = self._forward(kwargs)
                if loss is None:
                    raise RuntimeError("training_step returned None; a piece of a step can't be left out")
                if number == 0:
                    self._zero_once(zero_grad)
                weight = gradients.weight(turn, share)
                backward(loss if weight == 1 else loss * weight)
            if self.timed is not None and number < len(share.turns) - 1:  # the last one waits for other ranks
                self._time(turn, time.perf_counter() - started)
            gradients.collect(turn)
            stats.after(turn)
            kept = loss.detach()
            if self.graphs:
                kept = kept.clone()
                if number == 0 and len(share.turns) > 1:
                    _own_gradients(trainer.lightning_module)
            losses.append((kept, sum(turn.sizes)))
        kwargs["batch"] = share
        return losses, extra

    def _zero_once(self, zero_grad: Any) -> None:
        """In a step that memory makes anew, gradients are gone already, and Lightning counts these calls."""
        if not self._zeroed:
            self._zeroed = True
            zero_grad()

    def _time(self, turn: Any, seconds: float) -> None:
        assert self.timed is not None
        device = self.trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        for number, part in getattr(self.trainer.strategy, "seconds", {turn.devices[0]: seconds}).items():
            self.timed.setdefault(number, []).append(part)


def _nothing() -> None:
    """In place of what Lightning would do."""


def _own_gradients(module: torch.nn.Module) -> None:
    """Gradients that later turns may add to: a graph's backward pass hands out its own memory as `grad`."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def _mean(losses: list[tuple[torch.Tensor, int]], device: torch.device) -> torch.Tensor:
    if not losses:
        return torch.zeros((), device=device)
    if len(losses) == 1:
        return losses[0][0]
    samples = sum(size for _, size in losses)
    return torch.stack([loss * (size / samples) for loss, size in losses]).sum()
