"""The forward and backward passes of one optimizer step, and what is summed over its pieces."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lockstep.arithmetic.exact_sum import Damaged, ExactSum
from lockstep.arithmetic.order import batch_seed, piece_seed
from lockstep.errors import UserError
from lockstep.step.audit import Gradients, asked_again, trained
from lockstep.step.batch import MicroBatch, StepBatch
from lockstep.step.batch_norm import BatchNormStats
from lockstep.step.finite import FiniteGradientCheck
from lockstep.step.gradients import ExactGradientSum, GradientSum, StartedSum
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
        self._restored: list[int | None] = []  # the grids of the statistics' exact sums

    def state_dict(self) -> dict[str, Any]:
        """Gradients that are under way; and under exact, the grids: the next sums round to them.

        Raises:
            NonFinite: the last step's gradient was not finite, or one under way.
        """
        self.finite.settle()
        late = {"late": [self._saved(started) for started in self.gradients.line]} if self.gradients.late else {}
        exact = self.statistics.exact
        if exact is None or not isinstance(self.gradients, ExactGradientSum):
            return late
        grids = self._whole(self.gradients.exponents, self.gradients.sum), self._whole(exact.exponents, exact)
        return {"gradients": grids[0], "statistics": grids[1]} | late

    def _whole(self, exponents: list[int | None], total: ExactSum | None) -> list[int | None]:
        """The grids of all groups: each process knows those of the groups that it sums."""
        own = total.own if total is not None else []
        found = self.gradients.strategy.gathered({at: exponents[at] for at in own})
        return [found.get(at, exponent) for at, exponent in enumerate(exponents)]

    def _saved(self, started: StartedSum) -> dict[str, Any]:
        """A gradient that is under way, summed; every process calls it."""
        gradients, bounds = started.result
        if not all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None):
            self._look(*started.give())
            self.finite.settle()
        names = {id(p): name for name, p in self._module.named_parameters()}
        named = {names[id(p)]: g for p, g in zip(started.parameters, gradients, strict=True) if g is not None}
        return {"step": started.step[0].step, "gradients": named, "bounds": bounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what a checkpoint of any layout held; no grids, where the run before was not exact."""
        parameters = dict(self._module.named_parameters())
        self.gradients.line.clear()
        for saved in state.get("late", []):
            given = {parameters[name]: gradient for name, gradient in saved["gradients"].items()}
            started = StartedSum(list(given), lambda: ([], []), (StepBatch([], 0, 0, 0, saved["step"], True), []))
            started.result = [torch.empty_like(p).copy_(gradient) for p, gradient in given.items()], saved["bounds"]
            self.gradients.line.append(started)
        if isinstance(self.gradients, ExactGradientSum) and state.get("gradients"):
            self.gradients.exponents = state["gradients"]
            self._restored = list(state["statistics"])

    @cached_property
    def statistics(self) -> BatchNormStats:
        """Made when the module is where it will stay."""
        return BatchNormStats(self.gradients, self._restored)

    def __call__(
        self, trainer: Any, step_batch: StepBatch, forward: Callable[[Any], Any], backward: Callable[[Tensor], Any]
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
        module, strategy, statistics = self._module, trainer.strategy, self.statistics
        audit = self.gradients.audit
        if audit and not audit.begin(trainer, step_batch):
            audit = None
        before = _values(module) if audit or self.finite.policy == "skip" else {}
        statistics.begin(step_batch)
        self.gradients.begin(step_batch)
        found: list[Outputs] = []
        waiting: deque[Any] = deque()  # micro-batches whose forward pass is ahead, in a pipeline

        def compute(number: int, micro_batch: MicroBatch) -> tuple[list[int], Any, Tensor, Outputs]:
            batch = self._batch(trainer, micro_batch, step_batch.step)
            seeds = [piece_seed(self.seed, step_batch.step, piece) for piece in micro_batch.pieces]
            weight = self.gradients.weight(micro_batch, step_batch)
            with strategy.micro_batch(micro_batch, seeds), self.gradients.micro_batch(number, step_batch):
                if self.graphs:
                    torch.compiler.cudagraph_mark_step_begin()
                loss, outputs = _numbers(forward(batch))
                if not strategy.ahead:
                    backward(loss if weight == 1 else loss * weight)
            return seeds, batch, loss, outputs

        def again(piece: int, device: int) -> Gradients:
            """The gradient of a piece, computed once more from the buffers as the step began."""
            with _apart(module, strategy, before):
                compute(0, trainer.datamodule.again(step_batch, piece, device))
                (found,) = strategy.piece_gradients(trained(module))
            return found

        def follow() -> None:
            """The backward pass of a stage before the last, which knows by now what the last one made of the piece."""
            micro_batch, seeds, batch, loss = waiting.popleft()
            with strategy.micro_batch(micro_batch, seeds), torch.no_grad():
                found.append(_numbers(forward(batch))[1])
            backward(loss)
            self.gradients.collect()

        try:
            for number, micro_batch in enumerate(step_batch.micro_batches):
                statistics.before()
                seeds, batch, loss, outputs = compute(number, micro_batch)
                statistics.after()
                if strategy.ahead:
                    waiting.append((micro_batch, seeds, batch, loss))
                    if len(waiting) > strategy.ahead:
                        follow()
                    continue
                if audit:
                    audit.note(micro_batch, strategy.piece_gradients(trained(module)))
                self.gradients.collect()
                found.append({name: value.clone() for name, value in outputs.items()} if self.graphs else outputs)
                if self.graphs and number == 0 and len(step_batch.micro_batches) > 1:
                    for parameter in module.parameters():  # whose `grad` is the graph's own memory
                        parameter.grad = None if parameter.grad is None else parameter.grad.clone()
            while waiting:
                follow()
            if audit:
                audit.compare(trainer, step_batch, again)
        except RuntimeError as error:
            if advised := advice(error, step_batch, trainer.datamodule.layout):
                raise UserError(advised) from error
            raise
        losses = [outputs["loss"] for outputs in found]
        try:
            self.gradients.wait()
            statistics.finish(step_batch)
            due = self.gradients.finish(step_batch, losses)
        except Damaged as damaged:
            raise asked_again(damaged, step_batch.step, strategy.root_device) from None
        if due is not None and self._look(*due, getattr(trainer.precision_plugin, "scaler", None)):
            _put_back(module, before)
            step_batch.skipped = True
        if trainer.is_last_batch or trainer.global_step + 1 == trainer.max_steps:
            self.finite.settle()
        if not found:  # the loss may be logged, with the others'
            return {"loss": next(module.parameters()).new_zeros(())}
        return _means(found, [sum(micro_batch.sizes) for micro_batch in step_batch.micro_batches])

    def apply_late(self) -> None:
        """Gives the parameters the oldest gradient that is under way.

        Raises:
            NonFinite: it is not finite.
        """
        self._look(*self.gradients.give())

    def _look(self, step_batch: StepBatch, losses: list[Tensor], scaler: torch.amp.GradScaler | None = None) -> bool:
        """Whether a step is skipped, of which the parameters have the gradient."""
        return self.finite.look(self._module, self.gradients.strategy.optimizers[0], step_batch, losses, scaler)

    @property
    def _module(self) -> Any:
        return self.gradients.strategy.lightning_module

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


def _values(module: torch.nn.Module) -> Outputs:
    """A copy of the buffers, running statistics, say."""
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _put_back(module: torch.nn.Module, values: Outputs) -> None:
    for name, buffer in module.named_buffers():
        if name in values:
            buffer.resize_(values[name].shape).copy_(values[name])


@contextmanager
def _apart(module: torch.nn.Module, strategy: Any, start: Outputs) -> Iterator[None]:
    """What is computed inside begins with the buffers `start` and leaves nothing behind."""
    held, now, device = [p.grad for p in module.parameters()], _values(module), strategy.root_device
    strategy.again = True
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        _put_back(module, start)
        for parameter in module.parameters():
            parameter.grad = None
        yield
    strategy.again = False
    _put_back(module, now)
    for parameter, gradient in zip(module.parameters(), held, strict=True):
        parameter.grad = gradient


def overrides(owner: Any, name: str, base: type) -> bool:
    """Whether `owner`, or its class, has a method `name` other than that of `base`."""
    return getattr(getattr(owner, name), "__func__", None) is not getattr(base, name)


def _numbers(output: Any) -> tuple[Tensor, Outputs]:
    """The loss that `training_step` returned, with its graph; and by name all numbers that it returned, without.

    Raises:
        UserError: there is no loss.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        said = "a dict without a tensor 'loss'" if isinstance(output, Mapping) else type(output).__name__
        why = "a piece of a step can't be left out; return its loss, or a dict with it under 'loss'"
        raise UserError(f"training_step returned {said}: {why}")
    if loss.numel() != 1:
        raise UserError(f"training_step returned a loss of shape {list(loss.shape)}: it must be one number, their mean")
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
