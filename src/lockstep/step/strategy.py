"""The base class of Lockstep's Lightning strategies, and the strategy of a single device."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, IntEnum
from functools import cache
from typing import Any, TypeVar

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn

from lockstep.arithmetic.layout import Layout
from lockstep.arithmetic.order import hooks_seed
from lockstep.arithmetic.seeding import seed_python_and_numpy
from lockstep.errors import StepRefused
from lockstep.step.batch import MicroBatch
from lockstep.step.parameters import refuse_meta

T = TypeVar("T")


class Action(Enum):
    """A pass of a micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"


def generators(device: torch.device) -> list[torch.Generator]:
    """Return the random generators of a piece on `device`: the device's, and the host's, from which mixup draws."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the generators of a piece on `device`."""
    for generator in generators(device):
        generator.manual_seed(seed)


class Hooks(IntEnum):
    """Hooks outside of pieces that are seeded together."""

    EPOCH_START = 0
    STEP_START = 1
    AFTER_PASSES = 2
    EVALUATION_END = 3
    EPOCH_END = 4


def seed_hooks(seed: int, hooks: Hooks, number: int, device: torch.device) -> None:
    """Seed the global generators, so that hooks draw the same on all ranks and layouts, and when a run continues.

    Args:
        seed: the run's seed.
        hooks: the hooks that follow.
        number: the number of their step or epoch.
        device: the process's device.
    """
    key = hooks_seed(seed, hooks, number)
    seed_python_and_numpy(key)
    seed_device(key, device)


class PieceStrategy(Strategy):
    """A Lightning strategy that runs the micro-batches of a step and gives the order of their passes.

    Attributes:
        weights: what this process has of the weights, and of their gradient; see `Layout`.
        less_memory: a setting with which the weights take less memory; empty: there is none.
        changing_parameters: names of the parameters without a gradient that `training_step` may change in this step.
        lightning_module: the module that is trained; Lightning's property, with another type.
    """

    lightning_module: Any
    weights = "whole"
    less_memory = ""
    changing_parameters: Collection[str] = ()
    _failed = False  # whether an error has ended the run
    _inside = False  # whether a micro-batch's forward pass runs, in which collectives are refused

    def setup(self, trainer: Any) -> None:
        """Move the module to the device.

        Raises:
            UserError: it has tensors without data.
        """
        self._failed = False
        refuse_meta(self.lightning_module)
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

    def schedule(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Action, int]]:
        """Yield the passes of a step's micro-batches in order, each with the index of its micro-batch.

        Here the backward pass of each micro-batch follows its forward pass.
        """
        for index in range(len(micro_batches)):
            yield Action.FORWARD, index
            yield Action.BACKWARD, index

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch, seed: int) -> Iterator[None]:
        """Return the context of a micro-batch's forward pass, with the device's generators seeded by `seed`."""
        with self._without_collectives():
            seed_device(seed, self.root_device)
            yield

    def seed_hooks(self, seed: int, hooks: Hooks, number: int) -> None:
        """Seed the random numbers of hooks, see the function `seed_hooks`."""
        seed_hooks(seed, hooks, number, self.root_device)

    @contextmanager
    def _without_collectives(self) -> Iterator[None]:
        """Return a context in which `all_gather` is refused."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from all ranks, outside of a micro-batch's forward pass.

        Raises:
            StepRefused: a micro-batch's forward pass runs. It is refused on one device too, since other layouts can't.
        """
        self.refuse_collective("gather from other ranks", "")
        gathered: Tensor = super().all_gather(tensor, group, sync_grads)  # type: ignore[safe-super]  # a mixin
        return gathered

    def use_reducer(self, wanted: bool) -> bool:
        """Choose whether the last passes of the next step sum its gradients over all processes. Only ddp can.

        Returns:
            Whether they will.
        """
        return False

    def passes_communicate(self) -> bool:
        """Return whether a pass needs the other processes, even where the module has all its weights."""
        return False

    def holds(self, thing: Any) -> bool:
        """Check whether this process has a parameter or layer and computes with it."""
        return True

    def gather_dicts(self, local_values: dict[T, Any]) -> dict[T, Any]:
        """Merge the dicts of processes that have different parts, on rank zero. Every process calls this.

        Keys of different parts differ, or they are names of parameters, of which each value is a part.
        """
        return local_values

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Return a context in which the module has all its weights, so that a pass needs no other process.

        What changes in them stays. Every process enters and leaves it, and changes the same.
        """
        yield

    def local_part(self, tensor: Tensor) -> Tensor:
        """Return this process's part of a parameter or of its gradient. Here it is all of it."""
        return tensor

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

    def refuse_collective(self, what: str, remedy: str) -> None:
        """Raise an error if the ranks may now start different numbers of collectives; on one device too.

        Args:
            what: what the user's code does, as in `training_step can't <what>`.
            remedy: what would be right in an evaluation.

        Raises:
            StepRefused: a micro-batch's forward pass runs.
        """
        if self._inside:
            raise StepRefused(
                f"training_step can't {what}, since ranks may have unequal numbers of pieces: return the number beside "
                "the loss, and the run logs its mean over all samples"
            )

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


def torch_devices(layout: Layout) -> list[torch.device]:
    """Return the devices of one process that uses all of them, in their order."""
    if layout.accelerator == "gpu":
        return [torch.device("cuda", index) for index in range(layout.devices)]
    return [torch.device("cpu")] * layout.devices


class SingleDevice(PieceStrategy, SingleDeviceStrategy):
    """One process on one device."""


def proxy(thing: Any, overrides: type) -> Any:
    """Return an object that shares the attributes of `thing` and has other methods. `thing` does not change.

    Its methods are those of `overrides`; the methods that `overrides` lacks are those of `thing`.
    """
    kind: Any = type(thing)
    instance = object.__new__(_proxy_class(kind, overrides))
    object.__setattr__(instance, "__dict__", thing.__dict__)
    return instance


@cache
def _proxy_class(kind: type, overrides: type) -> Any:
    return type(kind.__name__, (overrides, kind), {})


class ClipsByStrategy:
    """A method for `proxy`: the proxy of the precision plugin has it in place of its own `clip_grad_by_norm`.

    It clips by the norm over the parts of all processes.
    """

    main_params: Any
    strategy: PieceStrategy

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip the gradients of an optimizer's parameters by their norm."""
        parameters = list(self.main_params(optimizer))
        nn.utils.clip_grads_with_norm_(parameters, clip_val, self.strategy.gradient_norm(parameters))
