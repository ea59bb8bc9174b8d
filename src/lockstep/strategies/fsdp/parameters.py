"""Which parameters `strategy=fsdp` cuts into parts, where, and which modules are gathered one after the other."""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.arithmetic.exact_sum import SMALL, dense
from lockstep.errors import UserError
from lockstep.text import join_names


@dataclass(eq=False)
class ShardedParameter:
    """A parameter of which each process keeps a part. All parts have equally many elements: the last ones are padded.

    The elements of a part have the order that they have in the memory of the whole parameter, in channels_last too.

    Attributes:
        name: its name in the module.
        tensor: the parameter of the module.
        strides: of the whole parameter.
        dim: the dimension along which it is cut.
        world_size: number of parts.
        rank: the number of this process's part.
        owner: the process whose optimizer gets the whole parameter; None: each process's gets its part.
        of_optimizer: the parameter that the optimizer gets.
        attributes: what a user has set on the parameter before it was cut.
    """

    name: str
    tensor: Any
    strides: tuple[int, ...]
    dim: int
    world_size: int
    rank: int
    owner: int | None = None
    of_optimizer: Any = None
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        shape: torch.Size = self.tensor.shape
        return shape

    @property
    def part_size(self) -> int:
        """Elements of a part, with padding."""
        return -(-self.shape[self.dim] // self.world_size) * prod(self.shape[: self.dim] + self.shape[self.dim + 1 :])

    @property
    def local(self) -> Tensor:
        """This process's part of the weights, without padding. Changes of it are changes of the parameter."""
        part: Tensor = self.tensor.detach().to_local()
        return part

    def shape_of_part(self, rank: int) -> list[int]:
        """Return the shape of a process's part, without padding."""
        rows = -(-self.shape[self.dim] // self.world_size)
        shape = list(self.shape)
        shape[self.dim] = max(0, min(rows, self.shape[self.dim] - rank * rows))
        return shape

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Cut a whole tensor into parts, without padding."""
        shapes = [self.shape_of_part(rank) for rank in range(self.world_size)]
        if self.dim:
            return list(whole.split([shape[self.dim] for shape in shapes], self.dim))
        ordered = with_strides(whole, self.strides)
        flat = ordered.as_strided((whole.numel(),), (1,))
        return [part.view(shape) for part, shape in zip(flat.split(list(map(prod, shapes))), shapes, strict=True)]

    def padded(self, part: Tensor) -> Tensor:
        """Return a part as one vector of `part_size` elements."""
        flat = part.reshape(-1)
        return flat if len(flat) == self.part_size else nn.functional.pad(flat, (0, self.part_size - len(flat)))

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor of padded parts, with the strides of the parameter."""
        shapes = [self.shape_of_part(rank) for rank in range(self.world_size)]
        cut = [part[: prod(shape)] for part, shape in zip(parts, shapes, strict=True)]
        if self.dim:
            return torch.cat([part.view(shape) for part, shape in zip(cut, shapes, strict=True)], self.dim)
        return torch.cat(cut).as_strided(self.shape, self.strides)

    def in_memory_order(self, gradient: Tensor) -> Tensor:
        """Return a part of a gradient, of which `fully_shard` has ordered the elements as in a contiguous tensor."""
        shape = self.shape_of_part(self.rank)
        part = gradient.reshape(-1)[: prod(shape)].view(shape)
        if self.dim or part.stride() == self.strides or not part.numel():
            return part
        ordered = torch.empty_strided(shape, self.strides, dtype=part.dtype, device=part.device).copy_(part)
        return ordered.as_strided((part.numel(),), (1,)).view(shape)

    def in_tensor_order(self, part: Tensor) -> Tensor:
        """Return a part with its elements in the order of a contiguous tensor; see `in_memory_order`."""
        if self.dim or not part.numel():
            return part
        return part.contiguous().as_strided(part.shape, self.strides).contiguous()

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where this process's part begins in the whole parameter, along each dimension."""
        first = min(self.shape[self.dim], self.rank * -(-self.shape[self.dim] // self.world_size))
        return tuple(first if dim == self.dim else 0 for dim in range(len(self.shape)))

    def as_parameter(self, part: Tensor) -> DTensor:
        """Return the distributed tensor of which `part` is this process's part."""
        like = self.tensor
        if part.device.type != like.device_mesh.device_type:  # offloaded: `from_local` would move it to the GPU
            made: Any = torch.empty_like(like.detach())
            made.to_local().copy_(part)
        else:
            made = DTensor.from_local(
                part, like.device_mesh, like.placements, run_check=False, shape=self.shape, stride=like.stride()
            )
        distributed: DTensor = made
        return distributed


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor, or this process's part of it, is in memory. It is the same for a detached tensor."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr(), int(local.storage_offset())


def names_of_keys(module: nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of a module's parameters by their keys in its state_dict, which hooks may have renamed."""
    named = {memory_of(tensor): name for name, tensor in module.named_parameters()}
    tensors = ((key, value) for key, value in state.items() if isinstance(value, Tensor) and value.numel())
    return {key: named[memory_of(value)] for key, value in tensors if memory_of(value) in named}


def dim_to_cut(parameter: nn.Parameter, parts: int) -> int | None:
    """Return the dimension along which a parameter is cut into parts; None if it stays whole.

    `fully_shard` cuts the first dimension anywhere, and others only evenly. Parameters that share a grid of exact sums
    are small, so none of them is cut. Nor is one of a user's own class, since its part would have another class.
    """
    if type(parameter) is not nn.Parameter:
        return None
    if not parameter.requires_grad or parameter.numel() <= SMALL or not parameter.is_floating_point():
        return None
    if not dense(parameter) or parameter.stride(0) * parameter.shape[0] != parameter.numel():
        return None  # its first dimension is not the outermost one in memory
    if parameter.shape[0] >= parts:
        return 0
    if not parameter.is_contiguous():
        return None
    return next((dim for dim, size in enumerate(parameter.shape) if size % parts == 0), None)


def other_dtypes(module: nn.Module, blocks: Sequence[nn.Module], sharded: set[int]) -> list[nn.Parameter]:
    """Return the parameters whose dtype is not that of most elements that are gathered together with them.

    `fully_shard` gathers one dtype at a time.

    Args:
        module: the whole module.
        blocks: the modules that are gathered one after the other; the rest of the module is gathered together.
        sharded: ids of the sharded parameters.
    """
    others: list[nn.Parameter] = []
    rest = set(sharded)
    for unit in (*blocks, module):
        parameters = [p for p in unit.parameters() if id(p) in rest]
        rest -= set(map(id, parameters))
        sizes: dict[torch.dtype, int] = {}
        for parameter in parameters:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        most = max(sizes, key=lambda dtype: sizes[dtype], default=None)
        others += [parameter for parameter in parameters if parameter.dtype != most]
    return others


def find_blocks(module: nn.Module, sharded: set[int], pattern: str | None) -> list[nn.Module]:
    """Return the modules whose weights are gathered one after the other, in the order of the module.

    They are the entries of containers that have several entries of one class, such as transformer blocks and stages. A
    block has a sharded parameter, and shares none with other modules.

    Args:
        module: the whole module.
        sharded: ids of the sharded parameters.
        pattern: pattern of their names instead; None: as above.

    Raises:
        UserError: no module of the pattern can be a block.
    """
    uses: dict[int, int] = {}
    for layer in module.modules():
        for tensor in layer._parameters.values():
            uses[id(tensor)] = uses.get(id(tensor), 0) + 1

    def can_be_block(block: nn.Module) -> bool:
        inside: dict[int, int] = {}
        for layer in block.modules():
            for tensor in layer._parameters.values():
                inside[id(tensor)] = inside.get(id(tensor), 0) + 1
        inside.pop(id(None), None)
        if type(block).forward is nn.Module.forward:  # a container that is not called, such as ModuleList
            return False
        return not inside.keys().isdisjoint(sharded) and all(uses[each] == count for each, count in inside.items())

    if pattern is not None:
        names = {name: each for name, each in module.named_modules() if name}
        chosen = [names[name] for name in names if fnmatch.fnmatchcase(name, pattern)]
        calls = [each for each in chosen if can_be_block(each)]
        if not calls:
            known = join_names([name for name, each in names.items() if can_be_block(each)], 6)
            raise UserError(f"strategy.blocks={pattern}: no module of this name has large weights of its own: {known}")
        nested = {id(part) for each in calls for part in each.modules() if part is not each}
        return [each for each in calls if id(each) not in nested]
    blocks: list[nn.Module] = []
    inside: set[int] = set()
    for container in module.modules():
        if not isinstance(container, nn.Sequential | nn.ModuleList | nn.ModuleDict) or id(container) in inside:
            continue
        kinds = [type(child) for child in container.children() if any(True for _ in child.parameters())]
        for child in container.children():
            if kinds.count(type(child)) > 1 and can_be_block(child) and id(child) not in inside:
                blocks.append(child)
                inside |= set(map(id, child.modules()))
    return blocks


def with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a tensor with these strides, itself if it has them."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def is_contiguous(strides: Sequence[int], shape: Sequence[int]) -> bool:
    """Check whether a tensor of these strides has its elements in memory in the order of the tensor."""
    return torch.empty_strided(tuple(shape), tuple(strides), device="meta").is_contiguous()


def has_shape(value: Any, shape: Sequence[int]) -> bool:
    """Check whether a value is a tensor of a shape."""
    return isinstance(value, Tensor) and list(value.shape) == list(shape)
