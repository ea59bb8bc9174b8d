"""What a checkpoint lacks: tensors that a module's state_dict leaves out, and Python attributes.

Such tensors are buffers with `persistent=False`, and keys that hooks remove. A checkpoint has those that have changed
since the run began. Of the others it has a SHA-256, since a module that is made again must make the same: a table of
positions, or weights that it has read elsewhere. No checkpoint has Python attributes of a module or of callbacks, nor
what their methods keep in globals and closures, so a resumed run names those that it lacks.
"""

import hashlib
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.data.seeding import contents_of
from lockstep.launch.failures import is_user_code
from lockstep.step.buffers import module_buffers

COMPARED_SAVES = 2  # saves for which the content of all is compared, since `.data` hides a change from the version
LIBRARIES = ("lightning.", "lockstep.", "lockstep_", "pytorch_lightning.", "torchmetrics.")
MOST = 100_000  # elements of a list or dict that is compared
MOST_BYTES = 1 << 24  # of an array or tensor that is compared: each save reads it
# What Lightning and torch keep in a module: flags and hooks, and what `save_hyperparameters` adds. The modes of layers
# are restored.
THEIRS = {*vars(pl.LightningModule()), *vars(nn.Module()), "track_running_stats"}
PREFIXES = ("_hparams", "_log_hyperparams", "_forward_", "_backward_", "_is_hf")


class Contents:
    """The contents of tensors by their place. It is computed again if there is another tensor, or another version."""

    def __init__(self) -> None:
        # The tensors, too: another one could have the `id` of one that is gone.
        self._known: dict[Any, tuple[Tensor, int, str]] = {}

    def of(self, place: Any, tensor: Tensor, anew: bool = False) -> str:
        """Return the content of the tensor that is at a place now; `anew`: whatever its version."""
        version = -1 if tensor.is_inference() else tensor._version
        known = self._known.get(place)
        if anew or known is None or known[0] is not tensor or not known[1] == version >= 0:
            known = self._known[place] = tensor, version, content_of(tensor)
        return known[2]


class LeftOut:
    """The tensors of a module that its state_dict leaves out.

    Args:
        module: the module, as it was made and before it continues from a checkpoint.
        state: its state_dict.
        strategy: the strategy, which compares parameters in parts itself.

    Attributes:
        sha256: of each of them, by name.
    """

    def __init__(self, module: Any, state: Mapping[str, Any], strategy: Any) -> None:
        self._in_parts: Mapping[str, Any] = getattr(strategy, "by_name", {})
        tensors = tensors_left_out(module, state, self._in_parts)
        self._contents = Contents()
        self.sha256 = {name: self._contents.of(name, tensor) for name, tensor in tensors.items()}
        self._changed: set[str] = set()
        self._compares = COMPARED_SAVES

    def restore(self, module: Any, saved: Mapping[str, Any]) -> list[str]:
        """Restore what had changed when a checkpoint was saved. Return the names of what is not as it was."""
        self._changed = {name for name, value in saved["changed"].items() if _restore(module, name, value)}
        others = [name for name, sha256 in saved["sha256"].items() if self.sha256.get(name, sha256) != sha256]
        return [*sorted(saved["changed"].keys() - self._changed), *others]

    def state(self, module: Any, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint has of them; empty if there are none.

        Args:
            module: the module.
            state: the checkpoint's state_dict.
        """
        tensors = tensors_left_out(module, state, self._in_parts)
        compares, self._compares = self._compares > 0, self._compares - 1
        for name in tensors.keys() - self._changed:
            if self._contents.of(name, tensors[name], anew=compares) != self.sha256.get(name):
                self._changed.add(name)
        if not tensors:
            return {}
        changed = {name: tensor.detach() for name, tensor in tensors.items() if name in self._changed}
        return {"changed": changed, "sha256": {name: self.sha256[name] for name in tensors if name not in changed}}


def _restore(module: Any, name: str, value: Tensor) -> bool:
    """Give a module the value of a tensor that it has, or of a buffer that it registers later. Return if it could."""
    path, _, key = name.rpartition(".")
    layer = module.get_submodule(path)
    tensor = layer._parameters.get(key, layer._buffers.get(key))
    if tensor is not None and (tensor.shape, tensor.dtype) == (value.shape, value.dtype):
        tensor.detach().copy_(value)
    elif key in layer._buffers:
        layer._buffers[key] = value.to(module.device)
    elif hasattr(layer, key):
        return False
    else:
        layer.register_buffer(key, value.to(module.device), persistent=False)
    return True


def tensors_left_out(module: Any, state: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the buffers and parameters of a module that its state_dict has under no name, without `others`."""
    buffers = {path: layer._buffers[name] for path, layer, name in module_buffers(module)}
    named = {**buffers, **dict(module.named_parameters())}
    missing = {
        name: tensor
        for name, tensor in named.items()
        if name not in state and name not in others and isinstance(tensor, Tensor) and _has_content(tensor)
    }
    if not missing:
        return {}
    saved = {value.data_ptr() for value in state.values() if isinstance(value, Tensor) and _has_content(value)}
    return {name: tensor for name, tensor in missing.items() if tensor.data_ptr() not in saved}


def _has_content(tensor: Tensor) -> bool:
    dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return dense and not isinstance(tensor, DTensor) and tensor.numel() > 0


def content_of(tensor: Tensor) -> str:
    """Return the shape, type and SHA-256 of a dense tensor of any device."""
    content: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{list(tensor.shape)} {tensor.dtype} {hashlib.sha256(content).hexdigest()}"


# --- Python attributes ---


class Attributes:
    """The attributes that a module and its callbacks have when a run starts, of plain data, and what they read around.

    Args:
        module: the module.
        callbacks: all callbacks of the run.
    """

    def __init__(self, module: nn.Module, callbacks: Sequence[pl.Callback]) -> None:
        self._module, self._callbacks = module, callbacks
        self._of_tensors = Contents()
        self._start = self.values()

    def values(self) -> dict[str, str]:
        """Return the content of each attribute now, by name."""
        contents = {name: self._content(value, (name,)) for name, value in _named(self._module, self._callbacks)}
        return {name: content for name, content in contents.items() if content is not None}

    def changed(self) -> dict[str, str]:
        """Return the contents of those that are not as they were at the start."""
        return {name: now for name, now in self.values().items() if self._start.get(name, now) != now}

    def _content(self, value: Any, place: tuple[Any, ...]) -> str | None:
        """Return what distinguishes a value of plain data, or a state of random numbers; None of other things.

        Args:
            value: the value.
            place: the name and the keys that lead to it.
        """
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
            return repr(value)
        if isinstance(value, Tensor):
            return self._of_tensor(value, place)
        if isinstance(value, np.ndarray):
            return None if value.dtype.hasobject or value.nbytes > MOST_BYTES else _sha256(value)
        if (state := _random_state(value)) is not None:
            return repr(state)
        if isinstance(value, nn.Module):  # beside the module's layers: a teacher in a list
            known = isinstance(value, pl.LightningModule) or type(value).__module__.startswith(LIBRARIES)
            return None if known else self._content(dict(value.state_dict()), (*place, 0))
        if len(place) > 4:
            return None
        if isinstance(value, dict):
            items = [(repr(key), self._content(value[key], (*place, repr(key)))) for key in list(value)[:MOST]]
            return repr([item for item in items if item[1] is not None])
        if isinstance(value, set | frozenset):
            return repr(sorted(map(repr, value)))
        if isinstance(value, list | tuple | deque):
            return repr([self._content(each, (*place, at)) for at, each in enumerate(list(value)[:MOST])])
        if isinstance(value, type) or not _is_users(type(value)):
            return None
        return self._content(getattr(value, "__dict__", {}), (*place, 0))

    def _of_tensor(self, tensor: Tensor, place: tuple[Any, ...]) -> str | None:
        outside = tensor.grad_fn is not None or isinstance(tensor, DTensor) or tensor.is_meta
        if outside or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_complex():
            return None
        return None if tensor.nbytes > MOST_BYTES else self._of_tensors.of(place, tensor)


def _named(module: nn.Module, callbacks: Sequence[pl.Callback]) -> Iterator[tuple[str, Any]]:
    """Give the attributes of a module, its layers and its users' callbacks by name, and what their methods read."""
    seen: set[int] = set()
    for path, layer in module.named_modules():
        if type(layer).__module__.startswith(LIBRARIES):
            continue
        owner = ".".join([type(module).__name__, *([path] if path else [])])
        for name, value in _attributes(layer).items():
            if name not in THEIRS and not name.startswith(PREFIXES):
                yield f"{owner}.{name}", value
        yield from _read_by(type(layer), seen)
    for callback in callbacks:
        classes = [kind for kind in type(callback).__mro__ if kind is not pl.Callback]
        if not any(kind.__module__.startswith(LIBRARIES) for kind in classes):
            for name, value in _attributes(callback).items():
                yield f"{type(callback).__name__}.{name}", value
            yield from _read_by(type(callback), seen)


def _read_by(kind: type, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Give the globals and closures that the methods of a user's class read, and the functions that these call.

    Args:
        kind: the class.
        seen: the ids of the functions that were visited; it grows.
    """
    methods = [value for each in kind.__mro__ if _is_users(each) for value in vars(each).values()]
    waiting = [getattr(method, "__func__", getattr(method, "fget", method)) for method in methods]
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if not is_user_code(function.__code__.co_filename):
            continue
        for key, value in contents_of(function):
            name = function.__code__.co_freevars[key] if isinstance(key, int) else key
            waiting.append(value)
            yield f"{function.__module__}.{name}", value


def _is_users(kind: type) -> bool:
    """Check whether a class is neither Lockstep's, nor Python's, nor an installed package's."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and is_user_code(file))


def _attributes(owner: Any) -> dict[str, Any]:
    """Return what an object has, and the numbers and texts that its users' classes begin with, such as `n = 0`."""
    kinds = [kind for kind in reversed(type(owner).__mro__) if not kind.__module__.startswith((*LIBRARIES, "torch."))]
    of_class = {name: value for kind in kinds for name, value in vars(kind).items() if not name.startswith("__")}
    return {name: each for name, each in of_class.items() if isinstance(each, bool | int | float | str)} | vars(owner)


def _random_state(value: Any) -> Any:
    """Return the state of a generator of random numbers; None of other things."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        state: Any = value.get_state()
        return _sha256(state[1]), state[2]
    if isinstance(value, torch.Generator):
        return _sha256(value.get_state())
    return None


def _sha256(array: Any) -> str:
    content: Any = np.ascontiguousarray(array)
    return hashlib.sha256(content.tobytes()).hexdigest()
