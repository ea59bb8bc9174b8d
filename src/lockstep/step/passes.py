"""The forward and backward passes of one optimizer step, and what is summed over its pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lockstep.arithmetic.exact import ExactSum
from lockstep.arithmetic.layout import Refusal
from lockstep.arithmetic.order import batch_seed, piece_seed
from lockstep.launch.watchdog import beat
from lockstep.step.batch import MicroBatch, StepBatch
from lockstep.step.batch_norm import BatchNormStats
from lockstep.step.finite import FiniteGradientCheck
from lockstep.step.gradients import ExactGradientSum, GradientSum
from lockstep.step.late import LateGradients
from lockstep.step.memory import advice

Outputs = dict[str, Tensor]


class StepPasses:
    """Computes the gradient of a step from its micro-batches.

    Args:
        gradients: how the gradients of a step's pieces are summed.
        finite: what is done about a gradient that is not finite.
        seed: the run's seed; what is random inside a piece follows from it, the step and the piece.
        graphs: networks run as CUDA graphs, whose tensors the next run overwrites.
    """

    def __init__(self, gradients: GradientSum, finite: FiniteGradientCheck, seed: int, graphs: bool = False) -> None:
        self.gradients = gradients
        self.finite = finite
        self.seed = seed
        self.graphs = graphs
        self.late = LateGradients(gradients, finite) if gradients.late else None
        self._statistics: BatchNormStats | None = None
        self._restored: list[int | None] = []  # the grids of the statistics' exact sums

    def state_dict(self) -> dict[str, Any]:
        """Gradients that are under way; and under exact, the grids: the next sums round to them.

        Raises:
            NonFinite: the last step's gradient was not finite, or one under way.
        """
        self.finite.settle()
        late = {"late": self.late.state_dict()} if self.late is not None else {}
        if not isinstance(self.gradients, ExactGradientSum):
            return late
        exact = self._statistics.exact if self._statistics is not None else None
        grids = {
            "gradients": self._whole(self.gradients.exponents, self.gradients.sum),
            "statistics": self._whole(exact.exponents if exact is not None else [], exact),
        }
        return grids | late

    def _whole(self, exponents: list[int | None], total: ExactSum | None) -> list[int | None]:
        """The grids of all groups: each process knows those of the groups that it sums."""
        own = total.own if total is not None else []
        found = self.gradients.strategy.gathered({at: exponents[at] for at in own})
        return [found.get(at, exponent) for at, exponent in enumerate(exponents)]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what a checkpoint held; no grids, where the run before was not exact."""
        if self.late is not None:
            self.late.load_state_dict(state.get("late", []))
        if isinstance(self.gradients, ExactGradientSum) and state.get("gradients"):
            self.gradients.exponents = state["gradients"]
            self._restored = list(state["statistics"])

    def __call__(
        self,
        trainer: Any,
        step_batch: StepBatch,
        forward: Callable[[Any], Any],
        backward: Callable[[Tensor], Any],
    ) -> Outputs:
        """Adds the gradient of the mean loss over the whole step's samples to the parameters', which are zero or none.
        With late gradients they get the one that is due instead, or none.

        Args:
            forward: from a micro-batch's batch to what `training_step` returns.
            backward: takes a loss, weighted by what its micro-batch counts for.

        Returns:
            `loss` and the other numbers that `training_step` returned beside it, each the mean over this process's
            samples, on its device. Of a process without a sample, a loss of 0.
        """
        module = trainer.lightning_module
        before = [buffer.clone() for buffer in module.buffers()] if self.finite.policy == "skip" else []
        statistics = self._statistics_of(module)
        statistics.begin(step_batch)
        self.gradients.begin(step_batch)
        found: list[Outputs] = []
        strategy = trainer.strategy
        waiting: deque[Any] = deque()  # micro-batches whose forward pass is ahead, in a pipeline

        def follow() -> None:
            """The backward pass of a stage before the last, which knows by now what the last one made of the piece."""
            micro_batch, seeds, batch, loss = waiting.popleft()
            with strategy.micro_batch(micro_batch, seeds), strategy.again(), torch.no_grad():
                found.append(_numbers(forward(batch))[1])
            backward(loss)
            self.gradients.collect()

        try:
            for number, micro_batch in enumerate(step_batch.micro_batches):
                beat(step_batch.step, number)
                batch = self._batch(trainer, micro_batch, step_batch.step)
                statistics.before()
                seeds = [piece_seed(self.seed, step_batch.step, piece) for piece in micro_batch.pieces]
                weight = self.gradients.weight(micro_batch, step_batch)
                with strategy.micro_batch(micro_batch, seeds), self.gradients.micro_batch(number, step_batch):
                    if self.graphs:
                        torch.compiler.cudagraph_mark_step_begin()
                    loss, outputs = _numbers(forward(batch))
                    if strategy.ahead:
                        waiting.append((micro_batch, seeds, batch, loss))
                    else:
                        backward(loss if weight == 1 else loss * weight)
                statistics.after()
                if strategy.ahead:
                    if len(waiting) > strategy.ahead:
                        follow()
                    continue
                self.gradients.collect()
                if self.graphs:
                    outputs = {name: value.clone() for name, value in outputs.items()}
                    if number == 0 and len(step_batch.micro_batches) > 1:
                        _own_gradients(module)
                found.append(outputs)
            while waiting:
                follow()
        except RuntimeError as error:
            if advised := advice(error, step_batch, trainer.datamodule.layout):
                raise Refusal(advised) from error
            raise
        losses = [outputs["loss"] for outputs in found]
        if self.late is not None:
            self.late.step(step_batch, losses, statistics)
        else:
            self.gradients.finish(step_batch)
            statistics.finish(step_batch)
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            if self.finite.look(module, trainer.optimizers[0], step_batch, losses, scaler):
                for buffer, value in zip(module.buffers(), before, strict=True):  # running statistics, say
                    buffer.resize_(value.shape).copy_(value)
        if trainer.is_last_batch or trainer.global_step + 1 == trainer.max_steps:
            self.finite.settle()
        if not found:  # the loss may be logged, with the others'
            return {"loss": next(module.parameters()).new_zeros(())}
        return _means(found, [sum(micro_batch.sizes) for micro_batch in step_batch.micro_batches])

    def _statistics_of(self, module: nn.Module) -> BatchNormStats:
        """Made at the first step: the module is where it will stay."""
        if self._statistics is None:
            strategy, world_size = self.gradients.strategy, self.gradients.world_size
            exact = isinstance(self.gradients, ExactGradientSum)
            self._statistics = BatchNormStats(module, strategy, world_size, exact, self._restored)
        return self._statistics

    def _batch(self, trainer: Any, micro_batch: MicroBatch, step: int) -> Any:
        """What `training_step` gets: each piece's samples mixed, and then what the module's own
        `on_after_batch_transfer` makes of them."""
        data, module = trainer.datamodule, trainer.lightning_module
        batch = data.finish(micro_batch)
        changes = [data.mix] if data.splits.mix else []
        if overrides(module, "on_after_batch_transfer", pl.LightningModule):
            changes.append(partial(module.on_after_batch_transfer, dataloader_idx=0))
        if not changes:
            return batch
        seeds = [batch_seed(self.seed, step, piece) for piece in micro_batch.pieces]

        def change(batch: Any) -> Any:
            for each in changes:
                batch = each(batch)
            return batch

        return trainer.strategy.by_piece(change, batch, micro_batch, seeds)


def overrides(owner: Any, name: str, base: type) -> bool:
    """Whether `owner`, or its class, has a method `name` other than that of `base`."""
    return getattr(getattr(owner, name), "__func__", None) is not getattr(base, name)


def _numbers(output: Any) -> tuple[Tensor, Outputs]:
    """The loss that `training_step` returned, with its graph; and by name all numbers that it returned, without.

    Raises:
        Refusal: there is no loss.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        said = "a dict without a tensor 'loss'" if isinstance(output, Mapping) else type(output).__name__
        raise Refusal(
            f"training_step returned {said}: a piece of a step can't be left out; return its loss, or a dict with it "
            "under 'loss'"
        )
    found = {"loss": loss.detach().reshape(())}
    for name, value in output.items() if isinstance(output, Mapping) else ():
        if isinstance(value, Tensor) and value.numel() == 1:
            found[name] = value.detach().reshape(())
        elif isinstance(value, int | float):
            found[name] = torch.full((), float(value), device=loss.device)
    return loss, found


def _means(found: list[Outputs], sizes: list[int]) -> Outputs:
    """Of each name, over the samples of the micro-batches that have it all."""
    if len(found) == 1:
        return found[0]
    samples = sum(sizes)
    return {
        name: torch.stack([each[name] * (size / samples) for each, size in zip(found, sizes, strict=True)]).sum()
        for name in found[0]
        if all(name in each for each in found)
    }


def _own_gradients(module: nn.Module) -> None:
    """Gradients that later micro-batches may add to: a graph's backward pass hands out its own memory as `grad`."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()
