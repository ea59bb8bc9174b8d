"""One optimizer step on this process: its micro-batches, each computed alone with the seed of its piece."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lockstep.arithmetic.order import preparation_seed, training_step_seed
from lockstep.errors import StepRefused, UserError
from lockstep.step.batch import CannotJoin, MicroBatch, StepBatch, copied, data_of, joined, repeated
from lockstep.step.buffers import StepBuffers
from lockstep.step.gradients import GradientSum
from lockstep.step.outputs import Outputs, others_of, outputs_of
from lockstep.step.strategy import generators_restored, seed_device
from lockstep.text import plural

# Hooks of modules and data modules that get the batch of a piece, in the order in which Lightning calls them.
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Step:
    """One optimizer step on this process.

    Args:
        batch: this process's part of the step.
        trainer: the trainer.
        gradients: sums the gradients of the step's pieces.
        seed: the run's seed.
        forward_pass: takes the data of a micro-batch, and the micro-batch; returns the result of `training_step`.
        backward_pass: takes a weighted loss, and the micro-batch; runs the backward pass.

    Attributes:
        number: the number of the optimizer step since the run began, 0-based.
        strategy: the trainer's strategy.
        module: the module that is trained.
        data: the trainer's data module.
        buffers: the module's buffers, from the first pass on.
        outputs: the numbers that `training_step` returned for each micro-batch, in the order of the micro-batches.
        others: what else it returned in a dict.
    """

    buffers: StepBuffers
    outputs: list[Outputs]
    others: list[dict[str, Any]]

    def __init__(
        self,
        batch: StepBatch,
        trainer: Any,
        gradients: GradientSum,
        seed: int,
        forward_pass: Callable[[Any, MicroBatch], Any],
        backward_pass: Callable[[Tensor, MicroBatch], None],
    ) -> None:
        self.batch, self.number = batch, batch.step
        self.trainer, self.data = trainer, data_of(trainer)
        self.gradients, self.seed = gradients, seed
        self.strategy, self.module = gradients.strategy, gradients.strategy.lightning_module
        self.forward_pass, self.backward_pass = forward_pass, backward_pass
        self.forget()
        # by index: the loss and its weight of each micro-batch that has had its forward pass, but not its backward pass
        self._pending: dict[int, tuple[Tensor, Any]] = {}

    def forget(self) -> None:
        """Forget what `training_step` has returned: an optimizer may run the passes of a step more than once."""
        self.outputs = [{} for _ in self.batch.micro_batches]
        self.others = [{} for _ in self.batch.micro_batches]

    @property
    def losses(self) -> list[Tensor]:
        """The losses of the micro-batches, in their order, without their graphs."""
        return [outputs["loss"] for outputs in self.outputs]

    def forward(self, index: int) -> None:
        """Run the forward pass of micro-batch `index`. Keep its graph until `backward`."""
        micro_batch = self.batch.micro_batches[index]
        loss, outputs, others = self.training_step(self.prepared(micro_batch), micro_batch)
        self._pending[index] = loss, outputs.get("weight")
        self.record(index, outputs, others)

    def record(self, index: int, outputs: Outputs, others: dict[str, Any]) -> None:
        """Record the numbers that `training_step` has returned for micro-batch `index`, and what is no number."""
        self.outputs[index], self.others[index] = outputs, others

    def backward(self, index: int) -> None:
        """Run the backward pass of micro-batch `index`, with its loss weighted by its samples."""
        loss, weight = self._pending.pop(index)
        self.differentiate(loss, self.batch.micro_batches[index], weight)

    def any_micro_batch(self) -> MicroBatch:
        """Return one of this process's micro-batches, or another process's if it has none."""
        if self.batch.micro_batches:
            return self.batch.micro_batches[-1]
        sizes = self.data.order.piece_sizes(self.number - self.batch.epoch * self.data.order.steps_per_epoch)
        piece = next(piece for piece, size in enumerate(sizes) if size)
        return self.data.fetch_piece(self.batch, piece, self.trainer.global_rank)

    def put_together(self) -> Any:
        """Return this process's samples of the step as one batch, as `training_step` gets them, in their order.

        A process without a sample gets a batch of none. Random generators stay as they are.

        Raises:
            UserError: the batches of the pieces can't be one.
        """
        micro_batches = sorted(self.batch.micro_batches, key=lambda each: each.piece)  # dp computes them in rounds
        # Lightning's ThroughputMonitor asks in inference mode, and other hooks may need these tensors, too
        with generators_restored(self.strategy.root_device), torch.inference_mode(False):
            if micro_batches:
                parts = [self.prepared(replace(each, batch=copied(each.batch))) for each in micro_batches]
            else:
                other = self.any_micro_batch()
                parts = [repeated(self.prepared(other), other.size, range(0))]
            try:
                batch = joined(parts, [each.size for each in micro_batches])
            except CannotJoin:
                raise UserError(
                    f"a hook uses the batch of a step, and the batches of its {plural(len(parts), 'piece')} can't be "
                    "put together: use batch.micro_batches, whose `batch` has the samples of a piece"
                ) from None
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

    def training_step(self, batch: Any, micro_batch: MicroBatch) -> tuple[Tensor, Outputs, dict[str, Any]]:
        """Run `training_step` on a prepared batch, with the piece's seed. Nothing is recorded.

        Args:
            batch: the batch; it may have another size than the micro-batch.
            micro_batch: its device computes the batch, with the random numbers of its piece.

        Returns:
            The loss, all numbers without graphs (a `weight` is divided by the samples), and what is no number.
        """
        if batch is None:
            raise StepRefused(
                "collate_fn returned None for a batch, which can't be left out of a step: leave samples out"
            )
        seed = training_step_seed(self.seed, self.batch.step, micro_batch.piece)
        with self.strategy.micro_batch(micro_batch, seed):
            returned = self.forward_pass(batch, micro_batch)
            others = others_of(returned, micro_batch.size)
            loss, outputs = outputs_of(returned)
        if "weight" in outputs:
            outputs["weight"] = outputs["weight"] / micro_batch.size
        return loss, outputs, others

    def differentiate(self, loss: Tensor, micro_batch: MicroBatch, loss_weight: Tensor | None) -> None:
        """Weight a micro-batch's loss and run its backward pass.

        Args:
            loss: the loss.
            micro_batch: the micro-batch.
            loss_weight: the weight that `training_step` returned beside the loss, per sample, or None.
        """
        weight = self.gradients.weight(micro_batch, self.batch)
        if loss_weight is None:
            self.backward_pass(loss if weight == 1 else loss * weight, micro_batch)
            return
        weight *= float(loss_weight)
        # The gradient of a mean over nothing may be nan.
        parameters = [p for p in self.module.parameters() if p.requires_grad and not weight]
        hooks = [parameter.register_hook(torch.zeros_like) for parameter in parameters]
        self.backward_pass(loss * weight, micro_batch)
        for hook in hooks:
            hook.remove()

    def prepared(self, micro_batch: MicroBatch) -> Any:
        """Return the batch for `training_step`: after mixup or cutmix, and the hooks of a batch's transfer."""
        data, device = self.data, self.strategy.root_device
        batch = data.prepare(micro_batch)
        hooks = {name: data.transfer_hook(name) for name in TRANSFER_HOOKS}
        if not data.mixes and not any(hooks.values()):
            return batch
        seed = preparation_seed(self.seed, self.batch.step, micro_batch.piece)
        seed_device(seed, device)
        if data.mixes:
            batch = data.mix(batch)
        for name, hook in hooks.items():
            if hook is not None:
                batch = hook(batch, device, 0) if name == "transfer_batch_to_device" else hook(batch, 0)
        return batch
