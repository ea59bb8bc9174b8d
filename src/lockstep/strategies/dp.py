"""`strategy=dp`: one process that computes each piece on the next of its devices (Lightning dropped dp in 2.0).

torch.nn.DataParallel replicates the module and runs the replicas in threads, in which autocast's dtype, random state
and logging go astray. Here one thread starts the forward passes of a round, one on each device, and then their backward
passes. CUDA kernels of different devices overlap all the same, because starting them does not wait. The devices are
CUDA devices, or logical ones on the CPU, so that the same code is tested without a GPU.

`torch.func.functional_call` runs the module's own `training_step` with copies of its tensors on the piece's device.
Gradients reach the module's parameters through those copies, in the order of the pieces' backward passes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from lockstep.step.batch import MicroBatch
from lockstep.step.protocols import Action
from lockstep.strategies.base import PieceStrategy, proxy, seed_device


class DataParallel(PieceStrategy, SingleDeviceStrategy):
    """One process, several devices.

    Args:
        devices: the devices in the order in which a step's pieces are dealt to them; the first one holds the module.

    Attributes:
        current_device: the device that computes now.
    """

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__(device=devices[0])
        self.devices = devices
        self.current_device = devices[0]
        self._number = 0  # of that device

    def schedule(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Action, int]]:
        """Yield the passes round by round: the forward passes of one piece on each device, then their backward passes.

        In a round, each device comes once, in rank order.
        """
        rounds: list[list[int]] = []
        for number, micro_batch in enumerate(micro_batches):
            if not rounds or micro_batches[rounds[-1][-1]].device >= micro_batch.device:
                rounds.append([])
            rounds[-1].append(number)
        for numbers in rounds:
            yield from ((Action.FORWARD, number) for number in numbers)
            yield from ((Action.BACKWARD, number) for number in numbers)

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch, seed: int) -> Iterator[None]:
        self._number = micro_batch.device
        self.current_device = device = self.devices[self._number]
        seed_device(seed, device)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the module; `training_step` on the piece's device, with copies of the module's tensors.

        Each piece has buffers of its own, since the backward passes of a round need them as they were. What a piece
        leaves in them is what the next piece starts from, as on one device.
        """
        if name != "training_step":
            return super().call(name, *args, **kwargs)
        module, device = self._computing, self.current_device
        copy = device != self.root_device or self._number > 0  # logical devices do what CUDA devices do
        parameters = {key: p.to(device, copy=copy, non_blocking=True) for key, p in module.named_parameters()}
        buffers = dict(module.named_buffers())
        copies = {key: buffer.to(device, copy=True, non_blocking=True) for key, buffer in buffers.items()}
        tensors = {f"module.{key}": tensor for key, tensor in (parameters | copies).items()}
        output = functional_call(
            TrainingStep(proxy(module, OnDevice)), tensors, _moved(args, device), _moved(kwargs, device)
        )
        for key, buffer in buffers.items():
            left = tensors[f"module.{key}"]
            if left is copies[key]:
                buffer.copy_(left)
            else:  # replaced
                owner, _, attribute = key.rpartition(".")
                setattr(module.get_submodule(owner), attribute, left.detach().to(self.root_device))
        return _moved(output, self.root_device)


class TrainingStep(nn.Module):
    """A module whose `forward` is another one's `training_step`, as `functional_call` needs it."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.training_step(*args, **kwargs)


class OnDevice:
    """What a module's proxy has before its class: the device that computes now."""

    trainer: Any

    @property
    def device(self) -> torch.device:
        current: torch.device = self.trainer.strategy.current_device
        return current

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value on the first device, where Lightning adds up those of all pieces."""
        super().log(name, _moved(value, self.trainer.strategy.root_device), *args, **kwargs)  # type: ignore[misc]


def _moved(value: Any, device: torch.device) -> Any:
    """Return tensors, or what holds tensors, on `device`."""
    return tree_map_only(Tensor, partial(Tensor.to, device=device, non_blocking=True), value)
