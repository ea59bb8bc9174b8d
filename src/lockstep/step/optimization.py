"""One optimizer step from its pieces: forward and backward passes, sums, and the optimizer."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from torch.optim import Optimizer

from lockstep.arithmetic.layout import Refusal
from lockstep.arithmetic.order import batch_seed, piece_seed
from lockstep.launch.watchdog import beat
from lockstep.step.batch_norm import BatchNormStats
from lockstep.step.finite import FiniteGradientCheck
from lockstep.step.gradients import ExactGradientSum, GradientSum
from lockstep.step.hooks import Hooks, overrides
from lockstep.step.memory import advice
from lockstep.step.strategies.single import now


class StepOptimization(_AutomaticOptimization):
    """Forward, backward and optimizer step, over the pieces of one share."""

    def __init__(self, trainer: pl.Trainer, gradients: GradientSum, watch: FiniteGradientCheck, seed: int) -> None:
        super().__init__(trainer)
        self.gradients = gradients
        self.watch = watch
        self.seed = seed
        self.exact = isinstance(gradients, ExactGradientSum)
        self.stats: BatchNormStats | None = None
        self.resumed: dict[str, Any] = {}
        self.timed: dict[int, list[float]] | None = None  # seconds of each device's turns, where somebody asks
        self.graphs = False  # whether networks run as CUDA graphs, whose tensors the next run overwrites
        self.hooks: Hooks
        self._indexed: bool | None = None  # whether `training_step` takes the batch's number
        self.zeroes_first = False  # before the forward pass: gradients don't lie beside activations
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
        trainer, step_batch = self.trainer, kwargs["batch"]
        strategy, module = trainer.strategy, trainer.lightning_module
        results = trainer.fit_loop.epoch_loop._results
        if self.stats is None:
            self.stats = BatchNormStats(module, strategy, self.gradients.world_size, self.exact)
            if self.stats.exact is not None and self.resumed:
                self.stats.exact.exponents = list(self.resumed["statistics"])
        self._zeroed = False
        before = [buffer.clone() for buffer in module.buffers()] if self.watch.policy == "skip" else []
        try:
            losses, extra = self._turns(kwargs, zero_grad, backward, self.stats, step_batch)
        except RuntimeError as error:
            if advised := advice(error, step_batch, trainer.datamodule.layout):  # type: ignore[attr-defined]
                raise Refusal(advised) from error
            raise
        results.batch_size = step_batch.num_local_samples  # for hooks that log after the turns
        self.gradients.finish(step_batch)
        self.stats.finish(step_batch)
        if self.gradients.world_size > 1:
            told = strategy.share_logged if step_batch.all_ranks_have_data else strategy.hold_logged  # type: ignore[attr-defined]
            told(results)
        self.watch.scaler = getattr(trainer.precision_plugin, "scaler", None)
        if self.watch.look(module, trainer.optimizers[0], step_batch, losses):
            for buffer, value in zip(module.buffers(), before, strict=True):  # running statistics, say
                buffer.resize_(value.shape).copy_(value)
        if trainer.is_last_batch or trainer.global_step + 1 == trainer.max_steps:
            self.watch.settle()
        return _mean(losses, module), extra

    def _turns(
        self, kwargs: OrderedDict[str, Any], zero_grad: Any, backward: Any, stats: BatchNormStats, step_batch: Any
    ) -> tuple[list[tuple[torch.Tensor, int]], dict[str, Any]]:
        """The forward and backward passes of a share; returns each turn's mean loss and its samples."""
        trainer, gradients = self.trainer, self.gradients
        strategy, results = trainer.strategy, trainer.fit_loop.epoch_loop._results
        losses: list[tuple[torch.Tensor, int]] = []
        extra: dict[str, Any] = {}
        stats.begin(step_batch)
        gradients.begin(step_batch)
        if self.zeroes_first or not step_batch.micro_batches:
            self._zero_once(zero_grad)
        for number, micro_batch in enumerate(step_batch.micro_batches):
            beat(step_batch.step, number)
            if self.graphs:
                torch.compiler.cudagraph_mark_step_begin()
            started = 0.0 if self.timed is None else now(strategy.root_device)
            batch = self._changed(trainer.datamodule.finish(micro_batch), micro_batch, step_batch.step)  # type: ignore[attr-defined]
            kwargs["batch"] = batch
            results.batch, results.batch_size = batch, None  # what `self.log` takes a mean's weight from
            stats.before(micro_batch)
            seeds = [piece_seed(self.seed, step_batch.step, piece) for piece in micro_batch.pieces]
            with strategy.micro_batch(micro_batch, seeds), gradients.micro_batch(number, step_batch):  # type: ignore[attr-defined]
                loss, extra = self._forward(kwargs)
                if loss is None:
                    raise RuntimeError("training_step returned None; a piece of a step can't be left out")
                if number == 0:
                    self._zero_once(zero_grad)
                weight = gradients.weight(micro_batch, step_batch)
                backward(loss if weight == 1 else loss * weight)
            if (
                self.timed is not None and number < len(step_batch.micro_batches) - 1
            ):  # the last one waits for other ranks
                self._time(micro_batch, now(strategy.root_device) - started)
            gradients.collect(micro_batch)
            stats.after(micro_batch)
            kept = loss.detach()
            if self.graphs:
                kept = kept.clone()
                if number == 0 and len(step_batch.micro_batches) > 1:
                    _own_gradients(trainer.lightning_module)
            losses.append((kept, sum(micro_batch.sizes)))
        kwargs["batch"] = step_batch
        return losses, extra

    def _changed(self, batch: Any, micro_batch: Any, step: int) -> Any:
        """A turn's batch after the module's own `on_after_batch_transfer`, which mixes images, say."""
        module = self.trainer.lightning_module
        if not overrides(module, "on_after_batch_transfer", pl.LightningModule):
            return batch
        seeds = [batch_seed(self.seed, step, piece) for piece in micro_batch.pieces]
        change = partial(module.on_after_batch_transfer, dataloader_idx=0)
        return self.trainer.strategy.by_piece(change, batch, micro_batch, seeds)  # type: ignore[attr-defined]

    def _zero_once(self, zero_grad: Any) -> None:
        """In a step that memory makes anew, gradients are gone already, and Lightning counts these calls."""
        if not self._zeroed:
            self._zeroed = True
            zero_grad()

    def _time(self, micro_batch: Any, seconds: float) -> None:
        assert self.timed is not None
        for number, part in getattr(self.trainer.strategy, "seconds", {micro_batch.devices[0]: seconds}).items():
            self.timed.setdefault(number, []).append(part)


def _own_gradients(module: torch.nn.Module) -> None:
    """Gradients that later turns may add to: a graph's backward pass hands out its own memory as `grad`."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def _mean(losses: list[tuple[torch.Tensor, int]], module: pl.LightningModule) -> torch.Tensor:
    if not losses:  # it may be logged, with the others'
        return torch.zeros((), device=module.device, dtype=module.dtype)  # type: ignore[arg-type]
    if len(losses) == 1:
        return losses[0][0]
    samples = sum(size for _, size in losses)
    return torch.stack([loss * (size / samples) for loss, size in losses]).sum()
