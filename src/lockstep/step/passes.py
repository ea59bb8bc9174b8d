"""One optimizer step: its forward and backward passes, and the hooks at fixed places between them."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lockstep.arithmetic.order import preparation_seed, training_step_seed
from lockstep.errors import StepRefused, UserError
from lockstep.launch.process_group import gather_objects
from lockstep.step.batch import CannotJoin, CannotRepeat, MicroBatch, StepBatch, StepData, data_of, joined, repeated
from lockstep.step.buffers import StepBuffers
from lockstep.step.gradients import GradientSum
from lockstep.step.memory import out_of_memory_advice
from lockstep.step.parameters import (
    check_parameters,
    gradient_versions,
    refuse_other_gradients,
    refuse_sparse_gradients,
)
from lockstep.step.strategy import Action, PieceStrategy, generators, seed_device
from lockstep.text import plural

Outputs = dict[str, Tensor]
# Hooks of modules and data modules that get the batch of a piece, in the order in which Lightning calls them.
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class StepHook:
    """Methods that are called at fixed places of each step, on every process. Override those that you need.

    The order of a step: `before_step`; for each piece of this process its forward pass, its backward pass and
    `after_piece`; `after_passes`; the sum of the gradient over all processes; `before_optimizer_step`; the optimizer
    step; `after_optimizer_step`.
    """

    def before_step(self, step: "Step") -> None:
        """Act before the first pass."""

    def after_piece(self, step: "Step", micro_batch: MicroBatch) -> None:
        """Act after a backward pass.

        With exact=true, the parameters have the gradient of this piece. Otherwise they have the sum of the pieces so
        far.
        """

    def after_passes(self, step: "Step") -> None:
        """Act after the last pass, before `GradientSum.reduce`.

        It may communicate, since every process calls it, also one without a sample.
        """

    def before_optimizer_step(self, step: "Step") -> None:
        """Act after the sum: the parameters have the gradient of `step`, the same on all processes that share it."""

    def after_optimizer_step(self, step: "Step") -> None:
        """Act after the weights have changed."""

    def on_error(self, step: "Step", error: Exception) -> None:
        """Act after an error in the step's passes or sums. It may raise an error with a better message instead."""

    def before_weights_are_read(self) -> None:
        """Act before a validation and before the weights are saved. Every process calls this."""

    def flush(self) -> None:
        """Wait for delayed results and raise their errors.

        Called before a checkpoint, at the end of an epoch and at the end of the run.
        """


class StepPasses:
    """Compute the gradient of a step from its micro-batches; a micro-batch is one piece on this process.

    Args:
        trainer: the trainer.
        gradients: sums the gradients of a step's pieces.
        hooks: the hooks of each step.
        seed: the run's seed. The random numbers inside a piece depend on it, the step and the piece.
        forward: takes the data of a micro-batch, and the micro-batch; returns the result of `training_step`.
        backward: takes a weighted loss, and the micro-batch; runs the backward pass.
    """

    def __init__(
        self,
        trainer: Any,
        gradients: GradientSum,
        hooks: Sequence[StepHook],
        seed: int,
        forward: Callable[[Any, MicroBatch], Any],
        backward: Callable[[Tensor, MicroBatch], None],
    ) -> None:
        self.trainer = trainer
        self.gradients = gradients
        self.hooks = hooks
        self.seed = seed
        self.forward, self.backward = forward, backward
        self._restored_state: dict[str, Any] = {}  # the state from a checkpoint
        self._weighted: bool | None = None  # whether `training_step` returns a weight; None before the first step
        self.last_outputs: StepOutputs | None = None  # those of the last step with a sample of this process
        self._checks_gradients = True  # in the next step

    @cached_property
    def buffers(self) -> StepBuffers:
        """The module's buffers; made at first use, when the module is on its device."""
        return StepBuffers(self.gradients, self._restored_state)

    @cached_property
    def leaves_ranks_empty(self) -> bool:
        """Whether a short last step of an epoch has fewer samples than pieces, so that a process may have none."""
        order = data_of(self.trainer).order
        tail = order.samples_per_epoch % order.layout.batch_size
        return self.gradients.world_size > 1 and 0 < tail < order.layout.pieces

    def begin_epoch(self) -> None:
        """Check the parameters, and the gradients of the epoch's first step.

        Raises:
            UserError: see `check_parameters`.
        """
        check_parameters(self.gradients, data_of(self.trainer).layout.pieces)
        self._checks_gradients = True

    def run(self, step: "Step") -> Outputs:
        """Compute the gradient of the mean loss over the whole step's samples, in the parameters' `.grad`.

        Returns:
            `loss` and the other numbers that `training_step` returned, each the mean over this process's samples, on
            its device. The loss of a process without a sample is 0.

        Raises:
            StepRefused: a pass ran out of memory, or `training_step` returned no loss.
        """
        gradients, buffers, step_batch = self.gradients, self.buffers, step.batch
        step.outputs, step.others = [], []  # an optimizer may run the passes of a step more than once
        try:
            for hook in self.hooks:
                hook.before_step(step)
            buffers.begin(step_batch, self._ends_epoch())
            gradients.begin(step_batch)
            for action, index in step.strategy.schedule(step_batch.micro_batches):
                if action is Action.FORWARD:
                    buffers.before_forward()
                    checks = self._checks_gradients and not index
                    before = gradient_versions(step.module) if checks else {}
                    step.forward(index)
                    buffers.after_forward()
                    if checks:
                        refuse_other_gradients(before, step.module)
                else:
                    buffers.before_backward()
                    step.backward(index)
                    buffers.after_backward()
                    if self._checks_gradients:
                        refuse_sparse_gradients(gradients)
                    for hook in self.hooks:
                        hook.after_piece(step, step_batch.micro_batches[index])
                    gradients.collect()
            self._checks_gradients = False
            for hook in self.hooks:
                hook.after_passes(step)
            self._sum_weights(step)
            buffers.finish(step_batch)
            if due := gradients.reduce(step):  # this step, or an earlier one whose sum is applied only now
                self.before_optimizer_step(due)
        except Exception as error:
            for hook in self.hooks:
                hook.on_error(step, error)
            advised = out_of_memory_advice(error, step.number, step.data.layout, step.strategy.less_memory)
            if advised and isinstance(error, RuntimeError | MemoryError):
                raise StepRefused(advised) from error
            raise
        if self._ends_epoch():
            self.flush()
            buffers.end_of_epoch()
        step_batch.returned = step.outputs
        return step.means()

    def _ends_epoch(self) -> bool:
        """Return whether this step is the last one of an epoch or of the run."""
        return bool(self.trainer.is_last_batch) or self.trainer.global_step + 1 == self.trainer.max_steps

    def _sum_weights(self, step: "Step") -> None:
        """Sum the weights that `training_step` has returned over the step's pieces, in their order, on every process.

        Raises:
            StepRefused: only some calls have returned one, or the strategy computes a step in stages.
        """
        returned = ["weight" in outputs for outputs in step.outputs]
        if self._weighted is None:  # ask once, since a process may have no sample
            self._weighted = any(gather_objects(any(returned)))
        if any(each != self._weighted for each in returned):
            raise StepRefused("training_step returns a weight beside some losses only: return one beside each")
        if not self._weighted:
            return
        if step.strategy.staged:
            raise StepRefused("training_step returns a weight, which stages can't sum: use another strategy")
        weights = [0.0] * step.data.layout.pieces
        for micro_batch, outputs in zip(step.batch.micro_batches, step.outputs, strict=True):
            weights[micro_batch.piece] = float(outputs["weight"]) * micro_batch.size
        if self.gradients.world_size > 1:
            of_all = torch.tensor(weights, dtype=torch.float64, device=step.strategy.root_device)
            dist.all_reduce(of_all)  # one number and zeros for each piece, so their sum is not rounded
            weights = of_all.tolist()
        step.batch.weight = math.fsum(weights)

    def before_optimizer_step(self, step: "Step") -> None:
        """Call the hooks before an optimizer step with the gradient of `step`."""
        for hook in self.hooks:
            hook.before_optimizer_step(step)

    def after_optimizer_step(self, step: "Step") -> None:
        """Call the hooks after an optimizer step."""
        for hook in self.hooks:
            hook.after_optimizer_step(step)

    def flush(self) -> None:
        """Read results that are still on the GPU, such as the check that all gradients are finite."""
        self.buffers.flush()
        for hook in self.hooks:
            hook.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the state on which later steps depend: of the sums of the gradients and of the buffers.

        Every process calls this.
        """
        self.flush()
        gradients = self.gradients.state_dict()
        return ({"gradients": gradients} if gradients else {}) | self.buffers.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint of any layout."""
        self.gradients.load_state_dict(state.get("gradients", {}))
        self._restored_state = state
        vars(self).pop("buffers", None)  # those of an earlier `fit` have another state


@dataclass(eq=False)
class Step:
    """One optimizer step on this process.

    Attributes:
        passes: the `StepPasses` that runs it.
        batch: this process's part of the step.
        outputs: the numbers that `training_step` returned for each micro-batch, in the order of their backward passes.
        others: what else it returned in a dict.
    """

    passes: StepPasses
    batch: StepBatch
    outputs: list[Outputs] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)
    _others: dict[str, Any] = field(default_factory=dict)  # those of the last pass
    # by index: the batch, loss and weight of each micro-batch that has had its forward pass, but not its backward pass
    _pending: dict[int, tuple[Any, Tensor, Any]] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The number of the optimizer step since the run began, 0-based."""
        return self.batch.step

    @property
    def trainer(self) -> Any:
        """The trainer."""
        return self.passes.trainer

    @property
    def strategy(self) -> PieceStrategy:
        """The trainer's strategy."""
        return self.passes.gradients.strategy

    @property
    def module(self) -> Any:
        """The module that is trained."""
        return self.strategy.lightning_module

    @property
    def data(self) -> StepData:
        """The trainer's data module."""
        return data_of(self.trainer)

    @property
    def losses(self) -> list[Tensor]:
        """The losses of the micro-batches, in the order of their backward passes, without their graphs."""
        return [outputs["loss"] for outputs in self.outputs]

    def forward(self, index: int) -> None:
        """Run the forward pass of micro-batch `index`. Keep its graph until `backward`."""
        micro_batch, strategy = self.batch.micro_batches[index], self.strategy
        batch = self.prepared(micro_batch)
        loss, outputs = self._training_step(batch, micro_batch)
        self._pending[index] = batch, loss, outputs.get("weight")
        if strategy.has_last_stage:
            self.outputs.append(outputs)
            self.others.append(self._others)

    def backward(self, index: int) -> None:
        """Run the backward pass of micro-batch `index`, with its loss weighted by its samples."""
        micro_batch, strategy = self.batch.micro_batches[index], self.strategy
        batch, loss, weight = self._pending.pop(index)
        if not strategy.has_last_stage:
            with torch.no_grad():
                self.outputs.append(self._training_step(batch, micro_batch)[1])
                self.others.append(self._others)
        self._differentiate(loss, micro_batch, weight)

    def compute(self, micro_batch: MicroBatch) -> None:
        """Run both passes of a piece of this step once more, whichever process computes it in the step.

        Its loss and the other numbers of `training_step` are not recorded.
        """
        loss, outputs = self._training_step(self.prepared(micro_batch), micro_batch)
        self._differentiate(loss, micro_batch, outputs.get("weight"))

    def trial_loss(self, batch: Any, micro_batch: MicroBatch, piece: int | None = None, graph: bool = False) -> Tensor:
        """Return the loss of a prepared batch; see `trial`.

        Args:
            batch: see `trial`.
            micro_batch: see `trial`.
            piece: see `trial`.
            graph: whether the loss has its graph, for a backward pass.
        """
        if graph:
            return self._training_step(batch, micro_batch)[0]
        return self.trial(batch, micro_batch, piece)["loss"]

    def trial(self, batch: Any, micro_batch: MicroBatch, piece: int | None = None) -> Outputs:
        """Return the numbers of a prepared batch of a micro-batch, without graphs. They are not recorded.

        Args:
            batch: the batch; it may have another size than the micro-batch.
            micro_batch: its device computes the batch.
            piece: the random numbers are those of the piece with this number; None: of the micro-batch's.
        """
        if piece is not None:
            micro_batch = replace(micro_batch, piece=piece)
        return self._training_step(batch, micro_batch)[1]

    def put_together(self) -> Any:
        """Return this process's samples of the step as one batch, as `training_step` gets them, in their order.

        A process without a sample gets a batch of none. Random generators stay as they are.

        Raises:
            UserError: the batches of the pieces can't be one.
        """
        micro_batches = sorted(self.batch.micro_batches, key=lambda each: each.piece)  # dp computes them in rounds
        device_generators = generators(self.strategy.root_device)
        states = [generator.get_state() for generator in device_generators]
        # Lightning's ThroughputMonitor asks in inference mode, and other hooks may need these tensors, too
        with isolate_rng(include_cuda=False), torch.inference_mode(False):
            if micro_batches:
                parts = [self.prepared(each) for each in micro_batches]
            else:
                index = self.number - self.batch.epoch * self.data.order.steps_per_epoch
                piece = next(piece for piece, size in enumerate(self.data.order.piece_sizes(index)) if size)
                first = self.data.fetch_piece(self.batch, piece, self.trainer.global_rank)
                parts = [repeated(self.prepared(first), first.size, range(0))]
            try:
                batch = joined(parts, [each.size for each in micro_batches])
            except CannotJoin:
                raise UserError(
                    f"a hook uses the batch of a step, and the batches of its {plural(len(parts), 'piece')} can't be "
                    "put together: use batch.micro_batches, whose `batch` has the samples of a piece"
                ) from None
        for generator, state in zip(device_generators, states, strict=True):
            generator.set_state(state)
        return batch

    def means(self) -> Outputs:
        """Return the numbers of `training_step`, each the mean over this process's samples.

        The mean of the loss is weighted, if `training_step` returns weights. A number that some micro-batch lacks is
        left out.
        """
        if not self.outputs:  # a rank without samples needs a loss, because all ranks may log it
            dtype = next(self.module.parameters()).dtype
            return {"loss": torch.zeros((), dtype=dtype, device=self.strategy.root_device)}
        weighted = all("weight" in each for each in self.outputs)
        if len(self.outputs) == 1 and not weighted:
            return self.outputs[0]
        sizes = [micro_batch.size for micro_batch in self.batch.micro_batches]
        samples = sum(sizes)
        means = {
            name: torch.stack([each[name] * (n / samples) for each, n in zip(self.outputs, sizes, strict=True)]).sum()
            for name in self.outputs[0]
            if all(name in each for each in self.outputs)
        }
        if weighted:  # a loss whose weight is 0 may be nan
            shares = torch.stack([each["weight"] * (n / samples) for each, n in zip(self.outputs, sizes, strict=True)])
            losses = torch.stack([each["loss"] for each in self.outputs]).where(shares > 0, 0)
            means["loss"] = (losses * shares).sum() / shares.sum().where(shares.sum() > 0, 1)
        return means

    def returned(self, numbers: Outputs) -> "StepOutputs":
        """Return what `on_train_batch_end` gets of the results of `training_step`."""
        micro_batches = self.batch.micro_batches
        order = sorted(range(len(self.others)), key=lambda at: micro_batches[at].piece)  # dp computes them in rounds
        sizes = [micro_batches[at].size for at in order]
        outputs = StepOutputs(numbers, [self.others[at] for at in order], sizes)
        if self.others and self.passes.leaves_ranks_empty:
            self.passes.last_outputs = outputs
        elif not self.others:
            outputs.before = self.passes.last_outputs
        return outputs

    def _training_step(self, batch: Any, micro_batch: MicroBatch) -> tuple[Tensor, Outputs]:
        """Run `training_step` on a prepared batch, with the piece's seed. Return the loss and all numbers."""
        if batch is None:
            raise StepRefused(
                "collate_fn returned None for a batch, which can't be left out of a step: leave samples out"
            )
        seed = training_step_seed(self.passes.seed, self.batch.step, micro_batch.piece)
        with self.strategy.micro_batch(micro_batch, seed):
            returned = self.passes.forward(batch, micro_batch)
            self._others = others_of(returned, micro_batch.size)
            loss, outputs = outputs_of(returned)
        if "weight" in outputs:
            outputs["weight"] = outputs["weight"] / micro_batch.size
        return loss, outputs

    def _differentiate(self, loss: Tensor, micro_batch: MicroBatch, loss_weight: Tensor | None) -> None:
        """Weight a micro-batch's loss and run its backward pass.

        Args:
            loss: the loss.
            micro_batch: the micro-batch.
            loss_weight: the weight that `training_step` returned beside the loss, per sample, or None.
        """
        weight = 1.0
        if self.strategy.has_last_stage:  # an earlier stage receives a gradient that is weighted already
            weight = self.passes.gradients.weight(micro_batch, self.batch)
        if loss_weight is None:
            self.passes.backward(loss if weight == 1 else loss * weight, micro_batch)
            return
        weight *= float(loss_weight)
        # The gradient of a mean over nothing may be nan.
        parameters = [p for p in self.module.parameters() if p.requires_grad and not weight]
        hooks = [parameter.register_hook(torch.zeros_like) for parameter in parameters]
        self.passes.backward(loss * weight, micro_batch)
        for hook in hooks:
            hook.remove()

    def prepared(self, micro_batch: MicroBatch) -> Any:
        """Return the batch for `training_step`: after mixup or cutmix, and the hooks of a batch's transfer."""
        data, device = self.data, self.strategy.root_device
        batch = data.prepare(micro_batch)
        hooks = {name: data.transfer_hook(name) for name in TRANSFER_HOOKS}
        if not data.mixes and not any(hooks.values()):
            return batch
        seed = preparation_seed(self.passes.seed, self.batch.step, micro_batch.piece)
        seed_device(seed, device)
        if data.mixes:
            batch = data.mix(batch)
        for name, hook in hooks.items():
            if hook is not None:
                batch = hook(batch, device, 0) if name == "transfer_batch_to_device" else hook(batch, 0)
        return batch


class StepOutputs(dict[str, Any]):
    """What `on_train_batch_end` gets of the results of `training_step`.

    What is no number is put together when a hook first asks for it. A process without a sample gets 0 for a number,
    and no rows.

    Args:
        numbers: the means of the numbers.
        others: the other results of each piece.
        sizes: the samples of each piece.

    Attributes:
        numbers: see Args.
        before: those of an earlier step, if this process has no sample in this one.
    """

    def __init__(self, numbers: Outputs, others: Sequence[dict[str, Any]], sizes: Sequence[int]) -> None:
        if others:  # one row of a piece with one sample looks like a number
            numbers = {name: value for name, value in numbers.items() if name not in others[0]}
        super().__init__(numbers)
        self.numbers = numbers
        self.before: StepOutputs | None = None
        self._others, self._sizes, self._refused = others, sizes, set[str]()

    def _complete(self) -> None:
        """Add what is no number, once."""
        others, self._others = self._others, []
        if self.before is not None:
            self._add_empty(self.before)
        for name in others[0] if others else ():
            if all(name in each for each in others):
                try:
                    value = joined([each[name] for each in others], self._sizes)
                    super().__setitem__(name, apply_to_collection(value, Tensor, Tensor.detach))
                except CannotJoin:
                    self._refused.add(name)

    def _add_empty(self, before: "StepOutputs") -> None:
        """Add the names of an earlier step's results, with 0 for numbers and no rows."""
        for name, value in before.items():
            if name in before.numbers:
                super().setdefault(name, torch.zeros_like(value))
            else:
                with suppress(CannotRepeat):
                    super().__setitem__(name, repeated(value, sum(before._sizes), range(0)))
        self.before = None

    def __missing__(self, name: str) -> Any:
        """Return what is no number; or raise an error that says why there is no such result."""
        self._complete()
        if super().__contains__(name):
            return super().__getitem__(name)
        if name in self._refused:
            raise UserError(
                f"a hook uses outputs[{name!r}], and what training_step returned for the pieces of the step can't be "
                "put together: return one row for each sample, or a number"
            )
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a result, or the default if there is none."""
        self._complete()
        return self[name] if name in self._refused else super().get(name, default)

    def __contains__(self, name: object) -> bool:
        """Check whether there is a result with this name."""
        self._complete()
        return super().__contains__(name) or name in self._refused

    def __iter__(self) -> Any:
        """Iterate the names."""
        self._complete()
        return super().__iter__()

    def __len__(self) -> int:
        """Return the number of results."""
        self._complete()
        return super().__len__()

    def keys(self) -> Any:
        """Return the names."""
        self._complete()
        return super().keys()

    def values(self) -> Any:
        """Return the results."""
        self._complete()
        return super().values()

    def items(self) -> Any:
        """Return the names and results."""
        self._complete()
        return super().items()


def numbers_of(outputs: Any) -> Outputs:
    """Return the numbers among what `on_train_batch_end` gets."""
    numbers: Outputs = outputs.numbers if isinstance(outputs, StepOutputs) else outputs
    return numbers


def others_of(returned: Any, size: int) -> dict[str, Any]:
    """Return what `training_step` returned in a dict beside the numbers.

    Args:
        returned: the result.
        size: samples of the piece. A tensor with as many rows is no number, also if there is one row.
    """
    if not isinstance(returned, Mapping):
        return {}
    others = {}
    for name, value in returned.items():
        rows = isinstance(value, Tensor) and value.ndim > 0 and (value.numel() != 1 or len(value) == size)
        if name != "loss" and (rows or not isinstance(value, Tensor | int | float)):
            others[name] = value
    return others


def outputs_of(output: Any) -> tuple[Tensor, Outputs]:
    """Split the result of `training_step` into its loss, which keeps its graph, and its numbers, which do not.

    Args:
        output: a loss, or a dict with `loss` and other numbers.

    Returns:
        The loss, and the numbers by name, the loss among them.

    Raises:
        StepRefused: there is no loss, or it is not one number; or there is a weight that is none.
    """
    values = output if isinstance(output, Mapping) else {"loss": output}
    loss = values.get("loss")
    if not isinstance(loss, Tensor):
        returned = "a dict without a tensor 'loss'" if values is output else type(output).__name__
        remedy = "it must return the loss of every batch, or a dict with it under 'loss'"
        raise StepRefused(f"training_step returned {returned}: {remedy}")
    if loss.numel() != 1:
        raise StepRefused(f"training_step returned a loss of shape {list(loss.shape)}: it must be one number, the mean")
    numbers = {"loss": loss.detach()}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            numbers[name] = value.detach()
        elif isinstance(value, int | float):
            numbers[name] = torch.full((), float(value), device=loss.device)
    if values.get("weight") is not None:
        _check_weight(values["weight"], numbers.get("weight"))
    return loss, {name: number.reshape(()) if number.ndim else number for name, number in numbers.items()}


def _check_weight(returned: Any, number: Tensor | None) -> None:
    """Check the weight beside a loss.

    Args:
        returned: what `training_step` returned.
        number: the same as one number, or None.

    Raises:
        StepRefused: it is not one finite number of 0 or more that follows from the batch alone.
    """
    if number is None or not 0 <= float(number) < math.inf:
        what = "what is no number" if number is None else f"{float(number):g}"
        raise StepRefused(
            f"training_step returned {what} as weight: it must be the denominator of its loss, one finite number of 0 "
            "or more"
        )
    if isinstance(returned, Tensor) and returned.requires_grad:
        raise StepRefused(
            "training_step returned a weight that depends on the parameters: it must follow from the batch alone, as "
            "a count of pixels does"
        )
