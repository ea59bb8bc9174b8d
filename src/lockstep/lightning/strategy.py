"""What all of Lockstep's Lightning strategies do otherwise than Lightning's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lockstep.arithmetic.layout import Action, Layout
from lockstep.arithmetic.order import hooks_seed
from lockstep.errors import UserError
from lockstep.step.batch import MicroBatch
from lockstep.step.strategy import PieceStrategy, seed_device, seed_python_and_numpy
from lockstep.text import join_names

Schedule = Callable[[Sequence[MicroBatch]], Iterator[tuple[Action, int]]]


class Hooks(IntEnum):
    """Hooks outside of pieces that are seeded together."""

    EPOCH_START = 0
    STEP_START = 1
    AFTER_PASSES = 2
    EVALUATION_END = 3
    EPOCH_END = 4


class StepStrategy(Strategy, PieceStrategy):
    """A Lightning strategy that runs the micro-batches of a step.

    Args:
        layout: the run's layout.
        schedule: gives the order of a step's passes; see `lockstep.strategies.Strategy`.
        options: those of Lightning's strategy.
    """

    lightning_module: Any
    _failed = False  # whether an error has ended the run

    def __init__(self, layout: Layout, schedule: Schedule, **options: Any) -> None:
        super().__init__(**options)
        self.name, self.weights, self._schedule = layout.strategy, layout.weights, schedule

    def schedule(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Action, int]]:
        """Yield the passes of a step's micro-batches in order, each with the index of its micro-batch."""
        return self._schedule(micro_batches)

    def setup(self, trainer: Any) -> None:
        """Move the module to the device.

        Raises:
            UserError: it has tensors without data.
        """
        self._failed = False
        module = self.lightning_module
        tensors = [*module.named_parameters(), *module.named_buffers()]
        if names := [name for name, tensor in tensors if tensor.is_meta]:
            raise UserError(
                f"{join_names(names, 2)} is on torch's device meta, so it has no values: make the module on a CPU, or "
                "fill it in configure_model: to_empty(device='cpu'), then its weights"
            )
        super().setup(trainer)

    def on_exception(self, exception: BaseException) -> None:
        """Note that an error ends the run."""
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """End the run. Let no other error hide the one that has ended it."""
        try:
            super().teardown()
        except RuntimeError:  # tensors without data, and those that an error's traceback has, can't move to the host
            if not self._failed:
                raise

    def seed_hooks(self, seed: int, hooks: Hooks, number: int) -> None:
        """Seed the global generators, so that hooks draw the same on all ranks and layouts, and when a run continues.

        Args:
            seed: the run's seed.
            hooks: the hooks that follow.
            number: the number of their step or epoch.
        """
        key = hooks_seed(seed, hooks, number)
        seed_python_and_numpy(key)
        seed_device(key, self.root_device)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from all ranks, outside of a micro-batch's forward pass.

        Raises:
            StepRefused: a micro-batch's forward pass runs. It is refused on one device too, since other layouts can't.
        """
        self.refuse_collective("gather from other ranks", "")
        gathered: Tensor = super().all_gather(tensor, group, sync_grads)  # type: ignore[safe-super]  # a mixin
        return gathered

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that have the same values on all processes."""
        return list(self.lightning_module.parameters())

    def take_assigned_gradients(self) -> None:
        """Give the optimizer what hooks have assigned to the gradients of the module's parameters.

        Here it has these parameters.
        """

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return the norm of the gradient of all `parameters`. With stages, every process calls this."""
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def start_evaluation_batch(self) -> None:
        """Prepare for the module's and callbacks' hooks of an evaluation batch."""

    def end_evaluation_batch(self) -> None:
        """Check what the hooks of an evaluation batch have done."""

    def prepare_metrics(self) -> None:
        """Prepare the user's metrics for their computation over all ranks."""

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the module, such as `training_step`, as this strategy runs it.

        Args:
            name: name of the method.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        return getattr(self.lightning_module, name)(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step` by `call`."""
        with self.precision_plugin.train_step_context():
            return self.call("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `validation_step` by `call`."""
        with self.precision_plugin.val_step_context():
            return self.call("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `test_step` by `call`."""
        with self.precision_plugin.test_step_context():
            return self.call("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `predict_step` by `call`."""
        with self.precision_plugin.predict_step_context():
            return self.call("predict_step", *args, **kwargs)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Return a context in which a checkpoint is put together and saved. Every process enters it."""
        yield

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint on rank zero, and on ranks that keep copies for their machine."""
        if self.is_global_zero or getattr(self.checkpoint_io, "keeps_copies", False):
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers, with states in the memory format of their parameters.

        torch's fused optimizers on CPU pair elements in storage order without a check, and the run that saved the
        checkpoint may have used another memory format.
        """
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
