"""What optimizers get of the parameters that `strategy=fsdp` cuts: parts, or whole copies on their owners.

Most optimizers work element by element, so they get this process's parts. One that needs whole tensors gets each tensor
on one process, its owner: the weights and the gradient are gathered there before a step, and the owner sends each
process its part of the new weights. Meanwhile nobody else may change them; what a hook changes is refused.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.errors import UserError
from lockstep.strategies.fsdp.parameters import ShardedParameter, has_shape

if TYPE_CHECKING:
    from lockstep.strategies.fsdp.strategy import FullySharded

# Optimizers of torch that compute each element of a parameter from the same element of its gradient and state.
BY_ELEMENT = {
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
}
# Those that compute each parameter from the whole of it, and from no other parameter.
BY_TENSOR = {torch.optim.Adafactor, getattr(torch.optim, "Muon", torch.optim.Adafactor)}


class SentGradient(NamedTuple):
    """A gradient that an optimizer has got for its next step.

    Attributes:
        parameter: the parameter.
        gradient: that of the module's parameter, of which the optimizer has a view or, on its owner, a whole copy.
        versions: of the gradient and of the weights, if there are copies; see `_versions`.
    """

    parameter: ShardedParameter
    gradient: Any
    versions: tuple[int, ...] = ()

    @property
    def is_copy(self) -> bool:
        """Whether the owner has whole copies of the gradient and of the weights."""
        return self.parameter.owner is not None and self.gradient is not None


class StateByParameter(defaultdict[Any, Any]):
    """The state of an optimizer: by the parameters that it has, and by those of the module that are cut.

    Args:
        state: what the optimizer has for its own parameters.
        parts: the sharded parameters by the id of what an optimizer has of one.
    """

    def __init__(self, state: Mapping[Any, Any], parts: Mapping[int, ShardedParameter]) -> None:
        super().__init__(dict, state)
        self._parts = parts

    def _key(self, tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        parameter = next((each for each in self._parts.values() if each.tensor is tensor), None)
        if parameter is None:
            return tensor
        if parameter.owner is not None:
            raise UserError(
                f"strategy=fsdp: optimizer.state of {parameter.name} is on rank {parameter.owner} alone, its owner: "
                "go over the parameters of optimizer.param_groups"
            )
        return parameter.of_optimizer

    def __missing__(self, tensor: Any) -> Any:
        """Return the state of a parameter that is not a key."""
        key = self._key(tensor)
        return super().__missing__(key) if key is tensor else self[key]

    def __setitem__(self, tensor: Any, value: Any) -> None:
        """Set the state of a parameter."""
        super().__setitem__(self._key(tensor), value)

    def __delitem__(self, tensor: Any) -> None:
        """Remove the state of a parameter."""
        super().__delitem__(self._key(tensor))

    def __contains__(self, tensor: Any) -> bool:
        """Check whether a parameter has a state."""
        return super().__contains__(self._key(tensor))

    def get(self, tensor: Any, default: Any = None) -> Any:
        """Return the state of a parameter."""
        return super().get(self._key(tensor), default)

    def pop(self, tensor: Any, *default: Any) -> Any:
        """Remove and return the state of a parameter."""
        return super().pop(self._key(tensor), *default)

    def __reduce__(self) -> Any:
        """Let copies be ordinary dicts."""
        return defaultdict, (dict, dict(self))


class OptimizerParts:
    """Gives optimizers their tensors, gradients and weights.

    Args:
        strategy: the strategy.

    Attributes:
        parameters: the sharded parameters of the optimizers, by the id of what an optimizer has of one.
    """

    def __init__(self, strategy: "FullySharded") -> None:
        self._strategy = strategy
        self.parameters: dict[int, ShardedParameter] = {}
        self._sent: list[SentGradient] = []  # of this step
        self._sums = torch.zeros(0)  # of the gradients and weights of which owners have copies

    def set_up(self, optimizers: Sequence[Any]) -> None:
        """Give optimizers their parts of the parameters, or whole tensors.

        Raises:
            UserError: as in `_give_parts`.
        """
        self.parameters, self._sent = {}, []
        for parameter in self._strategy.sharded.values():
            parameter.owner = parameter.of_optimizer = None
        for optimizer in optimizers:
            self._give_parts(optimizer)

    def _give_parts(self, optimizer: Any) -> None:
        """Replace an optimizer's sharded parameters by parts of them, or by whole tensors on their owners.

        Raises:
            UserError: it is not known what the optimizer needs, or it has tensors that the module lacks.
        """
        mine = set(map(id, self._strategy.lightning_module.parameters()))
        on_cpu = self._strategy.root_device.type == "cpu" or self._strategy.offload
        # Fused optimizers on a CPU give other bits where a vector of the processor's size ends.
        fused = on_cpu and any(group.get("fused") for group in optimizer.param_groups)
        by_tensor = needs_whole_tensors(optimizer) or fused
        loads = [0] * self._strategy.world_size
        for group in optimizer.param_groups:
            for position, tensor in enumerate(group["params"]):
                _, parameter = self._strategy.before.get(id(tensor), (None, self._strategy.sharded.get(id(tensor))))
                if parameter is None:
                    if self._strategy.sharded and id(tensor) not in mine and id(tensor) not in self.parameters:
                        raise UserError(
                            f"strategy=fsdp: {type(optimizer).__name__} has a tensor of shape {list(tensor.shape)} "
                            "that is no parameter of the module: make the optimizer in configure_optimizers, of "
                            "self.parameters()"
                        )
                    continue
                if by_tensor:
                    parameter.owner = loads.index(min(loads))
                    loads[parameter.owner] += parameter.shape.numel()
                    part = parameter.local.new_empty(0)
                else:
                    parameter.owner, part = None, parameter.local
                parameter.of_optimizer = nn.Parameter(part)
                vars(parameter.of_optimizer).update(parameter.attributes)
                state = optimizer.state.pop(tensor, None)
                if state is not None and not by_tensor:
                    optimizer.state[parameter.of_optimizer] = {
                        name: self._part_of(value, parameter) for name, value in state.items()
                    }
                group["params"][position] = parameter.of_optimizer
                self.parameters[id(parameter.of_optimizer)] = parameter
        self.guard_states([optimizer])

    def guard_states(self, optimizers: Sequence[Any]) -> None:
        """Let states of optimizers be read by the parameters of the module, too. Loading a state undoes this."""
        for optimizer in optimizers if self._strategy.sharded else ():
            optimizer.state = StateByParameter(optimizer.state, self.parameters)

    def _part_of(self, value: Any, parameter: ShardedParameter) -> Any:
        """Return this process's part of an optimizer's state."""
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and has_shape(value, parameter.shape):
            return parameter.parts(value)[self._strategy.global_rank].clone()
        return self._strategy.local_part(value)

    def give_gradients(self) -> None:
        """Give the optimizer the gradients of the sharded parameters. Every process calls this."""
        self._sent = []
        for optimizer in self._strategy.optimizers:
            if any(isinstance(group["params"][0], DTensor) for group in optimizer.param_groups if group["params"]):
                self._give_parts(optimizer)  # a hook has added a group
        for parameter in self.parameters.values():
            gradient = parameter.tensor.grad
            sent = SentGradient(parameter, gradient)
            if sent.is_copy:
                whole = self._strategy.gathered(parameter, gradient.to_local(), parameter.owner or 0)
                sent = self._with_new_weights(sent)
            else:
                whole = None if gradient is None else gradient.to_local()
            if parameter.owner in (None, self._strategy.global_rank):
                parameter.of_optimizer.grad = whole
            self._sent.append(sent)
        self._sums = self._sums_of_copied()

    @torch.no_grad()
    def _with_new_weights(self, sent: SentGradient) -> SentGradient:
        """Give the owner of a parameter its weights. Every process calls this."""
        parameter = sent.parameter
        weights = self._strategy.gathered(parameter, parameter.local, parameter.owner or 0)
        if weights is not None:
            of_optimizer = parameter.of_optimizer
            if of_optimizer.shape == weights.shape:
                of_optimizer.copy_(weights)
            else:
                of_optimizer.data = weights
        return sent._replace(versions=_versions(parameter))

    def send_changed_weights(self) -> None:
        """Send the weights of which owners have copies to all processes: an optimizer may have changed them."""
        with torch._C.DisableTorchFunctionSubclass():  # a hook may call this
            for sent in self._sent:
                if sent.is_copy:
                    self._check_weights(sent)
                    self._send_parts(sent.parameter)

    def give_weights(self) -> None:
        """Give owners the weights of which they have copies. Every process calls this."""
        with torch._C.DisableTorchFunctionSubclass():  # likewise
            self._sent = [self._with_new_weights(sent) if sent.is_copy else sent for sent in self._sent]
            self._sums = self._sums_of_copied()

    def take_assigned_gradients(self) -> None:
        """Give the optimizer what hooks have assigned to the gradients of the module's parameters.

        Raises:
            UserError: it can't be given.
        """
        with torch._C.DisableTorchFunctionSubclass():
            self._take_assigned_gradients()

    def _take_assigned_gradients(self) -> None:
        for number, sent in enumerate(self._sent):
            parameter, gradient = sent.parameter, sent.parameter.tensor.grad
            name, of_optimizer = parameter.name, parameter.of_optimizer
            self._check_weights(sent)
            if gradient is sent.gradient and not (sent.is_copy and _versions(parameter) != sent.versions):
                continue
            if gradient is not None:
                if parameter.owner is not None:
                    raise self._changed("gradient", parameter)
                if not isinstance(gradient, DTensor) or gradient.placements != parameter.tensor.placements:
                    raise UserError(
                        f"strategy=fsdp: a hook has set the gradient of {name} to a tensor that is not cut as {name} "
                        "is: compute it from the gradient, element by element"
                    )
                if _address(of_optimizer.grad) != _address(self._strategy.local_part(sent.gradient)):
                    raise UserError(
                        f"strategy=fsdp: hooks have set the gradient of {name} both in the module and in "
                        "optimizer.param_groups: set one of them"
                    )
            of_optimizer.grad = None if gradient is None else gradient.to_local()
            self._sent[number] = sent._replace(gradient=gradient) if parameter.owner is None else sent

    def _check_weights(self, sent: SentGradient) -> None:
        """Check that nobody has changed the weights of which an owner has a copy.

        Raises:
            UserError: a hook has.
        """
        if sent.is_copy and _versions(sent.parameter)[2:] != sent.versions[2:]:
            raise self._changed("weights", sent.parameter)

    def _sums_of_copied(self) -> Tensor:
        """Return the sums of this process's parts of the gradients and weights of which owners have copies."""
        copied = [sent for sent in self._sent if sent.is_copy]
        parts = [part.detach() for each in copied for part in (each.gradient.to_local(), each.parameter.local)]
        return torch.stack([part.sum(dtype=torch.float64) for part in parts]) if parts else torch.zeros(0)

    def _check_sums(self) -> None:
        """Check what `take_assigned_gradients` does not see: changes by way of `.data`.

        Raises:
            UserError: a hook has changed a gradient or weights of which an owner has a copy.
        """
        sums = self._sums_of_copied()
        if torch.equal(sums.nan_to_num(), self._sums.nan_to_num()):
            return
        number = int((sums.nan_to_num() != self._sums.nan_to_num()).nonzero()[0])
        sent = [sent for sent in self._sent if sent.is_copy][number // 2]
        raise self._changed("weights" if number % 2 else "gradient", sent.parameter)

    def _changed(self, what: str, parameter: ShardedParameter) -> UserError:
        right = "change gradients of optimizer.param_groups"
        if what == "weights":
            right = "do so within trainer.strategy.whole_weights()"
        copied = f"{parameter.name}, of which {type(self._strategy.optimizers[0]).__name__} has a whole copy"
        return UserError(f"strategy=fsdp: a hook has changed the {what} of {copied}: {right}")

    def end_step(self, optimizer: Any) -> None:
        """Check what an optimizer's step has changed.

        Raises:
            UserError: as in `_check_sums`, or the optimizer has stepped before with these gradients.
        """
        owned = [each for each in self.parameters.values() if each.owner is not None]
        if not self._sent and any(each.tensor.grad is not None for each in owned):
            raise UserError(
                f"strategy=fsdp: {type(optimizer).__name__} steps twice with one gradient, of which its owners have no "
                "more copies: step once"
            )
        self._check_sums()

    def send_from_owners(self) -> None:
        """Send the weights that owners have to all processes, and free the owners'."""
        gradients, self._sent, self._sums = self._sent, [], torch.zeros(0)
        for sent in gradients:
            if not sent.is_copy:
                continue
            parameter = sent.parameter
            self._check_weights(sent)
            self._send_parts(parameter)
            if parameter.of_optimizer.numel():
                parameter.of_optimizer.data = parameter.local.new_empty(0)
                parameter.of_optimizer.grad = None

    @torch.no_grad()
    def _send_parts(self, parameter: ShardedParameter) -> None:
        """Send the weights of a parameter from its owner to all processes."""
        part = torch.empty(parameter.part_size, dtype=parameter.tensor.dtype, device=self._strategy.root_device)
        parts = None
        if self._strategy.global_rank == parameter.owner:
            wholes = parameter.parts(parameter.of_optimizer.data)
            parts = [parameter.padded(each).contiguous().to(self._strategy.root_device) for each in wholes]
        dist.scatter(part, parts, src=parameter.owner)
        local = parameter.local
        local.copy_(part[: local.numel()].view(local.shape))

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return the norm of the gradient of all `parameters`, of the module or of an optimizer.

        Every process calls this. If the run is exact, one process computes each tensor's norm from the whole tensor.
        It is the norm of the gradients that the optimizer has got, as hooks have changed them.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self._gradient_norm(parameters)

    def _gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        self.take_assigned_gradients()
        copied = {id(sent.parameter) for sent in self._sent if sent.is_copy}
        # One column for each parameter: its gradient's norm, and 1 if it has a gradient.
        norms = torch.zeros(2, len(parameters), dtype=torch.float64, device=self._strategy.root_device)
        squares = torch.zeros(len(parameters), dtype=torch.bool, device=self._strategy.root_device)
        for number, tensor in enumerate(parameters):
            parameter = self.parameters.get(id(tensor)) or self._strategy.sharded.get(id(tensor))
            if parameter is None:
                gradient = tensor.grad
            elif id(parameter) in copied or (parameter.owner is None and parameter.of_optimizer is not None):
                gradient = parameter.of_optimizer.grad
            else:
                gradient = parameter.tensor.grad
            if gradient is None:
                continue
            part = self._strategy.local_part(gradient)
            if parameter is None:
                takes_part, value = self._strategy.global_rank == 0, part
            elif id(parameter) in copied:  # only its owner has a gradient
                takes_part, value = True, part
            elif self._strategy.exact:
                rank = number % self._strategy.world_size if parameter.owner is None else parameter.owner
                whole = self._strategy.gathered(parameter, part, rank)
                takes_part, value = whole is not None, part if whole is None else whole
            else:
                squares[number] = True
                norms[0, number] = norm_of(part).double() ** 2
                norms[1, number] = 1
                continue
            if takes_part:
                norms[0, number] = norm_of(value).double()
                norms[1, number] = 1
        dist.all_reduce(norms)
        values = torch.where(squares, norms[0].sqrt(), norms[0])
        return torch.linalg.vector_norm(values[norms[1] > 0].to(parameters[0].dtype))

    def numbered(self, optimizer: Any) -> list[tuple[int, ShardedParameter]]:
        """Return the sharded parameters of an optimizer with their numbers in its state."""
        tensors = enumerate(tensor for group in optimizer.param_groups for tensor in group["params"])
        return [(number, self.parameters[id(each)]) for number, each in tensors if id(each) in self.parameters]


def needs_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer needs whole tensors; False if it computes each element by itself.

    An optimizer's class says so by its attribute `works_on`: `elements` or `tensors`.

    Raises:
        UserError: it is not known.
    """
    kind = type(optimizer)
    works_on = getattr(kind, "works_on", None)
    if works_on == "tensors" or kind in BY_TENSOR:
        return True
    if works_on == "elements" or kind in BY_ELEMENT:
        return False
    raise UserError(
        f"strategy=fsdp: it is not known whether {kind.__name__} needs whole tensors: give its class an attribute "
        "works_on = 'elements' (each element by itself) or 'tensors' (each tensor by itself), or use strategy=ddp"
    )


def norm_of(tensor: Tensor) -> Tensor:
    """Return the norm of a tensor, by the kernel with which torch clips gradients."""
    return torch._foreach_norm([tensor])[0] if tensor.is_cuda else torch.linalg.vector_norm(tensor)


def _versions(parameter: ShardedParameter) -> tuple[int, ...]:
    """Return version counters of a parameter's gradient and of its weights, two of each; a change raises one of them.

    A distributed tensor has one, and its local part another.
    """
    tensors = (parameter.tensor.grad, parameter.tensor)
    return tuple(
        count
        for each in tensors
        for count in ((0, 0) if each is None else (each._version, each.detach().to_local()._version))
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
