"""`strategy=dp`: one process that scatters each forward pass over several devices (Lightning dropped it in 2.0).

`training_step` sees the whole micro-batch, so its loss is right for chunks of any size, and metrics live in one place.
Only `forward` is scattered: a piece per device, each with its own dropout mask and its own BatchNorm batch. Devices
are CUDA devices, or logical ones on the CPU, so that the same code is tested without a GPU.

torch.nn.DataParallel replicates the module and runs replicas in threads, in which autocast's dtype, random state and
logging go astray. Here `torch.func.functional_call` runs the one module with each device's copies of its tensors, from
one thread: CUDA kernels of different devices overlap all the same, because launching them does not wait. What calls it
is a twin of the module, which has the module's attributes and another `forward`: the user's object stays as it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map, tree_map_only

from lockstep.errors import UserError
from lockstep.step.batch import MicroBatch
from lockstep.step.batch_norm import statistics
from lockstep.strategies.base import PieceStrategy, seed_device, twin
from lockstep.text import join_names

UNTOLD = ("running_mean", "running_var")  # torch's kernels change these without a new version


class DataParallel(PieceStrategy, SingleDeviceStrategy):
    """One process, several devices.

    Args:
        devices: the devices in the order in which a step's pieces are dealt to them; the first one holds the module.
        exact: each piece's gradient is kept by itself, for exact sums of several.
    """

    copies_buffers = True

    def __init__(self, devices: list[torch.device], exact: bool = False) -> None:
        super().__init__(device=devices[0])
        self.devices = devices
        self.exact = exact
        self._micro_batch: Any = None  # the one under way, and its pieces' seeds
        self._scattered = False  # whether its forward pass has been made
        self._leaves: list[dict[str, Tensor]] = []  # under exact, the parameters that each of its pieces used
        self._buffers: list[dict[str, Tensor]] = []  # what each of its pieces left in the buffers

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch, seeds: list[int]) -> Iterator[None]:
        """Scatters the forward pass inside over the micro-batch's pieces."""
        self._micro_batch, self._scattered, self._buffers, self._leaves = (micro_batch, seeds), False, [], []
        try:
            yield
        finally:
            self._micro_batch = None
        if not self._scattered:
            raise UserError("strategy=dp scatters forward(): training_step must call self(x), not a layer of its own")

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        module = self._computing
        return getattr(twin(module) if name == "training_step" else module, name)(*args, **kwargs)

    def by_piece(self, change: Callable[[Any], Any], batch: Any, micro_batch: MicroBatch, seeds: list[int]) -> Any:
        changed = []
        for seed, piece in zip(seeds, _slices(batch, micro_batch), strict=True):
            seed_device(seed, self.root_device)
            changed.append(change(piece))
        return _gather(changed, self.root_device)

    def piece_buffers(self, names: list[str], buffers: list[Tensor]) -> list[list[Tensor]]:
        return [[found[name].to(self.root_device) for name in names] for found in self._buffers]

    def piece_gradients(self, parameters: list[nn.Parameter]) -> list[list[Tensor | None]]:
        """Raises UserError if the loss depends on a parameter in another way too, of which no piece has a part."""
        if not self.exact:
            return super().piece_gradients(parameters)
        module: Any = self.lightning_module
        past = [name for name, p in module.named_parameters() if p.grad is not None and bool(p.grad.any())]
        if past:
            why = "where gradients of single pieces can't be told apart: use it inside, or strategy=ddp"
            raise UserError(
                f"strategy=dp exact=true: training_step uses {join_names(past)} outside of forward(), {why}"
            )
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        found = [[leaves[name].grad for name in names] for leaves in self._leaves]
        return tree_map_only(Tensor, lambda gradient: gradient.to(self.root_device), found)

    def forward(self, args: Any, kwargs: Any) -> Any:
        """The module's `forward` of the micro-batch under way, each piece on its device; gathered on the first one."""
        micro_batch, seeds = self._micro_batch
        if self._scattered:  # pieces would begin anew: the same dropout, and statistics that count twice
            raise UserError("strategy=dp: training_step calls forward() more than once; strategy=ddp lets it")
        self._scattered = True
        module: Any = self.lightning_module
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        averaged = {f"{name}.{own}" for name, layer in statistics(module).items() for own in layer._buffers}
        outputs: list[Any] = []
        pieces = _slices((args, kwargs), micro_batch)
        for number, seed, piece in zip(micro_batch.devices, seeds, pieces, strict=True):
            device = self.devices[number]
            # detached copies would lose their gradients, so parameters go to other devices inside the graph
            tensors = {name: parameter.to(device, non_blocking=True) for name, parameter in parameters.items()}
            if self.exact:
                tensors = {n: t.detach().requires_grad_(parameters[n].requires_grad) for n, t in tensors.items()}
                self._leaves.append(tensors)
            own = {name: buffer.to(device, copy=True) for name, buffer in buffers.items()}
            self._buffers.append(own)
            versions = {name: buffer._version for name, buffer in own.items() if name not in averaged}
            used = {**tensors, **own}  # buffers that are replaced are replaced in here
            here = partial(Tensor.to, device=device, non_blocking=True)
            piece_args, piece_kwargs = tree_map_only(Tensor, here, piece)
            seed_device(seed, device)
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                outputs.append(functional_call(module, used, piece_args, piece_kwargs))
            for name, version in versions.items():  # the next piece goes on from there, as on one device
                if used[name] is not own[name]:
                    owner, _, attribute = name.rpartition(".")
                    buffers[name] = used[name].detach().to(self.root_device)
                    setattr(module.get_submodule(owner), attribute, buffers[name])
                elif own[name]._version != version or name.endswith(UNTOLD):
                    buffers[name].copy_(own[name])
        return _gather(outputs, self.root_device)


def _slices(value: Any, micro_batch: MicroBatch) -> Iterator[Any]:
    """For each piece its samples, of every tensor that has those of the whole micro-batch."""
    total, stop = sum(micro_batch.sizes), 0
    for size in micro_batch.sizes:
        start, stop = stop, stop + size
        cut = partial(_cut, slice(start, stop), total)
        yield tree_map_only(Tensor, cut, value)


def _cut(part: slice, total: int, tensor: Tensor) -> Tensor:
    return tensor[part] if tensor.dim() and len(tensor) == total else tensor


def _gather(outputs: list[Any], device: torch.device) -> Any:
    """What was returned for each piece, as one: tensors, or dicts, lists or tuples of them."""

    def join(*parts: Any) -> Tensor:
        if not isinstance(parts[0], Tensor):
            raise UserError(f"strategy=dp can't gather a {type(parts[0]).__name__} from pieces: return tensors")
        if len(parts) == 1:
            return parts[0].to(device)
        if not parts[0].dim():
            raise UserError("strategy=dp: forward() returned one number for a whole piece: return something per sample")
        return torch.cat([part.to(device) for part in parts])

    return tree_map(join, *outputs)
