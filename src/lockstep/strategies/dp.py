"""`strategy=dp`: one process that scatters each forward pass over several devices (Lightning dropped it in 2.0).

`training_step` sees the whole micro-batch, so its loss is right for chunks of any size, and metrics live in one place.
Only `forward` is scattered: a piece per device, each with its own dropout mask and its own BatchNorm batch. Devices
are CUDA devices, or logical ones on the CPU, so that the same code is tested without a GPU.

torch.nn.DataParallel replicates the module and runs replicas in threads, in which autocast's dtype, random state and
logging go astray. Here `torch.func.functional_call` runs the one module with each device's copies of its tensors, from
one thread: CUDA kernels of different devices overlap all the same, because launching them does not wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.func import functional_call

from lockstep.strategies.single import seed_device


class DataParallel(SingleDeviceStrategy):
    """One process, several devices.

    Args:
        devices: the devices in the order in which a step's pieces are dealt to them; the first one holds the module.
        apart: each piece's gradient is kept by itself, for exact sums.
    """

    copies_buffers = True

    def __init__(self, devices: list[torch.device], apart: bool = False) -> None:
        super().__init__(device=devices[0])
        self.devices = devices
        self.apart = apart
        self.seconds: dict[int, float] = {}  # of each device's last forward pass
        self._leaves: list[dict[str, Tensor]] = []
        self._turn: tuple[Any, list[int]] | None = None
        self._buffers: list[dict[str, Tensor]] = []
        self._scattered = False

    @contextmanager
    def turn(self, turn: Any, seeds: list[int]) -> Iterator[None]:
        """Scatters the forward pass inside over the turn's pieces."""
        module: Any = self.lightning_module
        self._turn, self._scattered, self._buffers, self._leaves = (turn, seeds), False, [], []
        plain = module.forward
        module.forward = self._scatter(plain)
        try:
            yield
        finally:
            del module.forward
            self._turn = None
        if not self._scattered:
            raise RuntimeError(
                "strategy=dp scatters forward(): training_step must call self(x), not a layer of its own"
            )

    def piece_buffers(self, names: list[str], buffers: list[Tensor]) -> list[list[Tensor]]:
        """What each piece of the turn just computed left in the named buffers, on the first device."""
        return [[found[name].to(self.root_device) for name in names] for found in self._buffers]

    def piece_gradients(self, parameters: list[nn.Parameter]) -> list[list[Tensor | None]]:
        """The gradient of each piece of the turn just computed, on the first device."""
        module: Any = self.lightning_module
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        found = [[leaves[name].grad for name in names] for leaves in self._leaves]
        return [[None if g is None else g.to(self.root_device) for g in gradients] for gradients in found]

    def no_sync(self) -> AbstractContextManager[Any]:
        """There is one process only."""
        return nullcontext()

    def _scatter(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        module: Any = self.lightning_module
        # detached copies would lose their gradients, so parameters go to other devices inside the graph
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())

        def forward(*args: Any, **kwargs: Any) -> Any:
            assert self._turn is not None
            turn, seeds = self._turn
            self._scattered = True
            outputs: list[Any] = []
            start = 0
            scattering, module.forward = module.forward, plain
            try:
                for number, size in zip(turn.devices, turn.sizes, strict=True):
                    device = self.devices[number]
                    tensors = {name: parameter.to(device, non_blocking=True) for name, parameter in parameters.items()}
                    if self.apart:
                        tensors = {
                            name: t.detach().requires_grad_(parameters[name].requires_grad)
                            for name, t in tensors.items()
                        }
                        self._leaves.append(tensors)
                    own = {name: buffer.to(device, copy=True) for name, buffer in buffers.items()}
                    self._buffers.append(own)
                    started = time.perf_counter()
                    seed_device(seeds[len(outputs)], device)
                    piece_args, piece_kwargs = _slice((args, kwargs), start, size, sum(turn.sizes), device)
                    outputs.append(functional_call(module, {**tensors, **own}, piece_args, piece_kwargs))
                    start += size
                    self.seconds[number] = time.perf_counter() - started
            finally:
                module.forward = scattering
            return _gather(outputs, self.root_device)

        return forward


def _slice(value: Any, start: int, size: int, total: int, device: torch.device) -> Any:
    """The samples `start` to `start + size` of every tensor that has `total` of them, on `device`."""
    if isinstance(value, Tensor):
        part = value[start : start + size] if value.dim() and value.shape[0] == total else value
        return part.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _slice(part, start, size, total, device) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_slice(part, start, size, total, device) for part in value)
    return value


def _gather(outputs: list[Any], device: torch.device) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        return first.to(device) if len(outputs) == 1 else torch.cat([output.to(device) for output in outputs])
    if isinstance(first, dict):
        return {key: _gather([output[key] for output in outputs], device) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_gather(list(parts), device) for parts in zip(*outputs, strict=True))
    raise TypeError(
        f"strategy=dp can't gather a {type(first).__name__} from forward(): return tensors, or dicts or lists of them"
    )
