"""One device, and what every strategy tells the loop about a turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn


def seed_device(seed: int, device: torch.device) -> None:
    """Seeds the generator that layers on `device` draw from, and the host's, from which the weights of a mix of images
    are drawn, say."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


def now(device: torch.device) -> float:
    """Seconds, once `device` has done what it was given: launching a kernel takes no time that matters."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class StateMixin:
    """An optimizer's restored state lies in memory as its parameters do, whatever the run before used: torch's fused
    optimizers on CPU go through both in the order of storage, unasked."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        for optimizer in self.optimizers:  # type: ignore[attr-defined]
            for parameter, state in optimizer.state.items():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


class PieceMixin(StateMixin):
    """A turn is one piece, computed by the module itself."""

    root_device: torch.device
    copies_buffers = False

    @contextmanager
    def micro_batch(self, micro_batch: Any, seeds: list[int]) -> Iterator[None]:
        """The context of a turn; `seeds` has one seed for each of its pieces."""
        seed_device(seeds[0], self.root_device)
        yield

    def by_piece(self, change: Callable[[Any], Any], batch: Any, micro_batch: Any, seeds: list[int]) -> Any:
        """A turn's batch, of which each piece has been changed by itself; `seeds` has one seed for each."""
        seed_device(seeds[0], self.root_device)
        return change(batch)

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
