"""One process, on one device or on several: `strategy=dp`.

torch.nn.DataParallel runs replicas of the module in threads, which lose autocast's dtype, the random state and logging.
Here one thread starts the forward passes of a round, one on each device, and then their backward passes. CUDA kernels
of different devices still overlap, because a launch does not wait for its kernel. The devices are CUDA devices, or
logical devices on the CPU, so that the same code is tested without a GPU.

`torch.func.functional_call` runs the module's `training_step` with copies of its tensors on the piece's device.
Autograd adds the gradients of the copies to the module's parameters, in the order of the pieces' backward passes.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from lockstep.arithmetic.layout import Layout
from lockstep.lightning.strategy import Schedule, StepStrategy
from lockstep.step.batch import MicroBatch
from lockstep.step.strategy import proxy


def devices_of(layout: Layout) -> list[torch.device]:
    """Return the devices of one process that uses all of a layout, in the order in which they get a step's pieces."""
    if layout.accelerator == "gpu":
        return [torch.device("cuda", index) for index in range(layout.devices)]
    return [torch.device("cpu")] * layout.devices


class OneProcess(StepStrategy, SingleDeviceStrategy):
    """One process with all devices of a layout. The module is on the first one.

    Args:
        layout: the run's layout.
        schedule: see `StepStrategy`.

    Attributes:
        devices: the devices.
    """

    def __init__(self, layout: Layout, schedule: Schedule) -> None:
        self.devices = devices_of(layout)
        super().__init__(layout, schedule, device=self.devices[0])
        self._current = 0  # the number of the device that computes the current piece

    @property
    def current_device(self) -> torch.device:
        """The device of the current micro-batch."""
        return self.devices[self._current]

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch, seed: int) -> Iterator[None]:
        """Return the context of a micro-batch's forward pass: its device is the current one and has `seed`."""
        self._current = micro_batch.device
        device = self.current_device
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with super().micro_batch(micro_batch, seed), on_device:
            yield

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the module; with several devices `training_step` on the piece's device.

        There, each piece has its own copies of the buffers, because its backward pass needs their old values. Their
        values after a piece are copied back, so that the next piece starts from them, as on one device. So are those of
        parameters without a gradient that it may change.

        Args:
            name: name of the method.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        if name != "training_step" or len(self.devices) == 1:
            return super().call(name, *args, **kwargs)
        module, device = self.lightning_module, self.current_device
        copy = self._current > 0  # between logical devices on the CPU `to` would not copy; between CUDA devices it does
        named = dict(module.named_parameters())
        changing = {key: named.pop(key) for key in self.changing_parameters if key in named}
        parameters = {key: p.to(device, copy=copy, non_blocking=True) for key, p in named.items()}
        buffers = dict(module.named_buffers()) | changing
        copies = {key: each.detach().to(device, copy=True, non_blocking=True) for key, each in buffers.items()}
        tensors = {f"module.{key}": tensor for key, tensor in (parameters | copies).items()}
        output = functional_call(
            TrainingStep(proxy(module, OnDevice)), tensors, _moved(args, device), _moved(kwargs, device)
        )
        for key, buffer in buffers.items():
            after = tensors[f"module.{key}"]
            if after is copies[key] or key in changing:
                # `.data` hides a copy without a change from the version, by which changed buffers are found
                (buffer if after._version else buffer.data).copy_(after.detach())
            else:  # the piece has replaced the buffer
                owner, _, attribute = key.rpartition(".")
                setattr(module.get_submodule(owner), attribute, after.detach().to(self.root_device))
        return _moved(output, self.root_device)


class TrainingStep(nn.Module):
    """A module whose `forward` is another module's `training_step`, for `functional_call`."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the other module's `training_step`."""
        return self.module.training_step(*args, **kwargs)


class OnDevice:
    """A mixin for `proxy`: the module's `device` is that of the current piece, and `log` works on every device."""

    trainer: Any

    @property
    def device(self) -> torch.device:
        """The device of the current piece."""
        current: torch.device = self.trainer.strategy.current_device
        return current

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value on the first device, where Lightning adds up the values of all pieces."""
        super().log(name, _moved(value, self.trainer.strategy.root_device), *args, **kwargs)  # type: ignore[misc]


def _moved(value: Any, device: torch.device) -> Any:
    """Return a tensor, or nested containers of tensors, on `device`."""
    return tree_map_only(Tensor, partial(Tensor.to, device=device, non_blocking=True), value)
