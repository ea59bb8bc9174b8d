"""What a checkpoint has of the tensors that `strategy=fsdp` cuts: whole ones on rank zero, or each process's part."""

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.strategies.fsdp.parameters import ShardedParameter, has_shape, names_of_keys, with_strides

if TYPE_CHECKING:
    from lockstep.strategies.fsdp.strategy import FullySharded


class CheckpointParts:
    """Puts checkpoints together, and cuts those that are loaded.

    Args:
        strategy: the strategy.
    """

    def __init__(self, strategy: "FullySharded") -> None:
        self._strategy = strategy
        # of the checkpoint that is being put together: stand-ins, this process's parts, and where these begin in the
        # whole tensors; None: it has whole tensors
        self._parts: list[tuple[Tensor, Tensor, tuple[int, ...]]] | None = None

    def begin(self, in_parts: bool) -> None:
        """Begin a checkpoint, and say whether each process writes its parts."""
        self._parts = [] if in_parts else None

    def whole_on_cpu(self, parameter: ShardedParameter, part: Tensor) -> Tensor:
        """Return a whole tensor of parts on rank zero, in the host's memory; on other ranks the part."""
        whole = self._strategy.gathered(parameter, part)
        return part if whole is None else whole.cpu()

    def to_save(self, parameter: ShardedParameter, part: Tensor) -> Tensor:
        """Return what a checkpoint has of a tensor: the whole of it, or a stand-in if each process writes its part."""
        if self._parts is None:
            return self.whole_on_cpu(parameter, part)
        return self._stand_in(parameter.in_tensor_order(part.detach()), parameter.offsets, parameter.shape)

    def _stand_in(self, part: Tensor, offsets: tuple[int, ...], shape: torch.Size) -> Tensor:
        assert self._parts is not None
        value = torch.empty(shape, dtype=part.dtype, device="meta")
        self._parts.append((value, part.contiguous(), offsets))
        return value

    def parts_of(self, checkpoint: dict[str, Any]) -> list[tuple[Tensor, Tensor, tuple[int, ...]]] | None:
        """Return this process's parts of a checkpoint as `io.save_parts` gets them; None: it has whole tensors."""
        if self._parts is None:
            return None
        state = checkpoint["state_dict"]
        for name, parameter in self._strategy.by_name.items():  # an average, which each process has whole
            if has_shape(value := state.get(name), parameter.shape) and not value.is_meta:
                state[name] = self.to_save(parameter, parameter.parts(value)[self._strategy.global_rank])
        return self._parts

    def saved(self, checkpoint: Mapping[str, Any]) -> Any:
        """Return what reads the tensors that stand-ins of a checkpoint stand for; None: it has none."""
        io: Any = self._strategy.checkpoint_io
        return io.saved_parts(checkpoint)

    def cut_weights(self, module: nn.Module, checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the weights of a checkpoint, with the module's own in place of stand-ins, and these stand-ins."""
        if (saved := self.saved(checkpoint)) is None:
            return checkpoint["state_dict"], {}
        state = copy(checkpoint["state_dict"])  # with the versions of layers, which some torchvision layers read
        mine = self._parameters(module)
        in_parts = {
            name: each for name, each in state.items() if saved.has(each) and has_shape(mine.get(name), each.shape)
        }
        state.update({name: mine[name].detach() for name in in_parts})
        return state, in_parts

    def _parameters(self, module: nn.Module) -> dict[str, Any]:
        """Return the module's parameters, by their names in it and in its state_dict."""
        named = dict(module.named_parameters(remove_duplicate=False))
        keys = self._strategy.names_of_keys or names_of_keys(module, module.state_dict())
        return {key: named[name] for key, name in keys.items() if name in named} | named

    @torch.no_grad()
    def read_weights(self, module: nn.Module, checkpoint: Mapping[str, Any], in_parts: Mapping[str, Tensor]) -> None:
        """Read the weights that stand-ins stand for, one after the other."""
        if (saved := self.saved(checkpoint)) is None:
            return
        mine = self._parameters(module)
        for name, value in in_parts.items():
            if (parameter := self._strategy.by_name.get(name)) is None:
                mine[name].copy_(saved.read(value))
            else:
                parameter.local.copy_(self._read_part(saved, value, parameter))
        self._strategy.gather_again()

    def _read_part(self, saved: Any, value: Tensor, parameter: ShardedParameter) -> Tensor:
        """Return this process's part of a tensor that is saved in parts, of this or another number of processes."""
        part = saved.read(value, parameter.offsets, parameter.shape_of_part(self._strategy.global_rank))
        return parameter.in_memory_order(part)

    def optimizer_state(self, optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint has of an optimizer's state, on rank zero. Every process calls this.

        Args:
            optimizer: it has this process's parameters.
            state: its state on this process.
        """
        of_owners: dict[int, Any] = {}
        states: dict[int, Any] = dict(state["state"])
        for number, parameter in self._strategy.of_optimizer.numbered(optimizer):
            entry = states.get(number)
            if parameter.owner is not None:
                if parameter.owner == self._strategy.global_rank and entry is not None:
                    of_owners[number] = {
                        name: self._of_owner(parameter, value) if isinstance(value, Tensor) else value
                        for name, value in entry.items()
                    }
                    states[number] = of_owners[number]
            elif entry is not None:
                shape = parameter.local.shape
                states[number] = {
                    name: self.to_save(parameter, value) if has_shape(value, shape) else value
                    for name, value in entry.items()
                }
        if any(parameter.owner is not None for _, parameter in self._strategy.of_optimizer.numbered(optimizer)):
            gathered: list[Any] | None = [None] * self._strategy.world_size if self._strategy.is_global_zero else None
            dist.gather_object(of_owners, gathered)
            for each in (gathered or [])[1:]:  # of the other processes
                states |= each
        return {**state, "state": dict(sorted(states.items()))}

    def _of_owner(self, parameter: ShardedParameter, value: Tensor) -> Tensor:
        """Return what a checkpoint has of an owner's tensor: a copy in the host's memory, or a stand-in."""
        if self._parts is None or not has_shape(value, parameter.shape):
            return value.detach().cpu()
        return self._stand_in(value.detach(), (0,) * value.dim(), value.shape)

    def cut_optimizer_state(self, optimizer: Any, state: Mapping[str, Any], saved: Any) -> dict[str, Any]:
        """Return what this process's optimizer needs of a state.

        Args:
            optimizer: it has this process's parameters.
            state: the state, with whole tensors, or with stand-ins.
            saved: see `saved`.
        """

        def cut(value: Any, parameter: ShardedParameter | None) -> Any:
            reads = saved is not None and saved.has(value)
            if parameter is None or not has_shape(value, parameter.shape):
                return saved.read(value) if reads else value
            if parameter.owner is not None:  # fused optimizers pair elements in the order of the memory
                return with_strides(saved.read(value) if reads else value, parameter.strides)
            if reads:
                part = self._read_part(saved, value, parameter)
            else:
                part = parameter.parts(value)[self._strategy.global_rank]
            return part.clone(memory_format=torch.contiguous_format)

        parameters = dict(self._strategy.of_optimizer.numbered(optimizer))
        states = {}
        for number, entry in state["state"].items():
            parameter = parameters.get(number)
            if parameter is None or parameter.owner in (None, self._strategy.global_rank):
                states[number] = {name: cut(value, parameter) for name, value in entry.items()}
        return {**state, "state": states}
