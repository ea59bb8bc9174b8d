"""One device, and what every strategy tells the loop about a turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn


def seed_device(seed: int, device: torch.device) -> None:
    """Seeds the generator that layers on `device` draw from."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class PieceMixin:
    """A turn is one piece, computed by the module itself."""

    root_device: torch.device
    copies_buffers = False

    @contextmanager
    def turn(self, turn: Any, seeds: list[int]) -> Iterator[None]:
        """The context of a turn; `seeds` has one seed for each of its pieces."""
        seed_device(seeds[0], self.root_device)
        yield

    def piece_buffers(self, names: list[str], buffers: list[Tensor]) -> list[list[Tensor]]:
        """What each piece of the turn just computed left in the named buffers."""
        return [buffers]

    def piece_gradients(self, parameters: list[nn.Parameter]) -> list[list[Tensor | None]]:
        """The gradient of each piece of the turn just computed."""
        return [[parameter.grad for parameter in parameters]]

    def no_sync(self) -> AbstractContextManager[Any]:
        """Backward passes inside keep their gradients to this process."""
        return nullcontext()


class SingleDevice(PieceMixin, SingleDeviceStrategy):
    """One process on one device."""
