"""One device, and what every strategy tells the passes of a step about a micro-batch."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn

from lockstep.arithmetic.layout import Layout
from lockstep.step.batch import MicroBatch
from lockstep.step.hooks import StepHook
from lockstep.step.passes import one_by_one
from lockstep.step.protocols import Action

T = TypeVar("T")


def generators(device: torch.device) -> list[torch.Generator]:
    """What layers on `device` draw from, and the host's, from which the weights of a mix of images are drawn, say."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def seed_device(seed: int, device: torch.device) -> None:
    """Seeds the generators of `device`."""
    for generator in generators(device):
        generator.manual_seed(seed)


class PieceStrategy(Strategy):
    """A strategy of Lightning's, on which a micro-batch is one piece that the module itself computes."""

    staged = False  # whether each process holds another part of the network, and sees all samples
    numbers_come_later = False  # whether a piece's loss is known only when its backward pass is due
    hooks: Sequence[StepHook] = ()  # of the trainer's steps
    substitute: Any = None  # what computes in the module's place

    def schedule(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Action, int]]:
        """Yield the order of the passes of a step's micro-batches, by their numbers."""
        return one_by_one(len(micro_batches))

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch, seed: int) -> Iterator[None]:
        """Return the context of a micro-batch's forward pass: layers draw from generators with this seed."""
        seed_device(seed, self.root_device)
        yield

    def seed(self, seed: int) -> None:
        """Seed the generators of the device to which batches come."""
        seed_device(seed, self.root_device)

    @property
    def outdated(self) -> bool:
        """Whether other parameters are trained than the strategy was set up for."""
        return False

    def start_reducer(self, first: bool) -> None:
        """Have gradients summed over all processes in the passes that follow: only ddp can."""

    def finish_reducer(self) -> None:
        """After those passes."""

    def holds(self, thing: Any) -> bool:
        """Whether this process has a parameter or layer, which it computes with."""
        return True

    def gather_parts(self, local_values: dict[T, Any]) -> dict[T, Any]:
        """What the processes hold that have different parts of a network, on rank zero."""
        return local_values

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """The norm of the gradient over all `parameters`. Where they are `staged`, every process calls it."""
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A step of the module, as this strategy runs it: `training_step`, say."""
        return getattr(self._computing, name)(*args, **kwargs)

    @property
    def _computing(self) -> Any:
        return self.substitute or self.lightning_module

    @contextmanager
    def computing_with(self, module: Any) -> Iterator[None]:
        """Inside, another object with the module's parameters computes in its place."""
        self.substitute = module
        try:
            yield
        finally:
            self.substitute = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        for hook in self.hooks:
            hook.before_weights_are_read()
        return super().lightning_module_state_dict()

    def on_validation_start(self) -> None:
        for hook in self.hooks:
            hook.before_weights_are_read()
        super().on_validation_start()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self.call("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self.call("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self.call("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self.call("predict_step", *args, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Rank zero writes, and so does a rank that keeps copies on its machine."""
        if self.is_global_zero or getattr(self.checkpoint_io, "receives", False):
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """An optimizer's restored state lies in memory as its parameters do, whatever the run before used: torch's
        fused optimizers on CPU go through both in the order of storage, unasked."""
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


class Redirected:
    """What the proxy of a module has before its class: a `forward` of the strategy's."""

    trainer: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.trainer.strategy.forward(args, kwargs)


def proxy(thing: Any, before: type = Redirected) -> Any:
    """An object with the attributes of another one and its class, but for the methods of `before`; the other one's own
    stay."""
    kind: Any = type(thing)
    instance = object.__new__(_proxy_class(kind, before))
    object.__setattr__(instance, "__dict__", thing.__dict__)
    return instance


@cache
def _proxy_class(kind: type, before: type) -> Any:
    return type(kind.__name__, (before, kind), {})
