"""The state of a module that its own code may change in a pass: saved before trial passes, and restored after them."""

import random
from collections import deque
from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.step.buffers import copy_buffers, restore_buffers

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # attributes that every module has
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), np.ndarray)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class SavedAttributes:
    """The plain Python attributes and the buffers of a module's layers, with copies of their content.

    Other objects of a user's own are neither saved nor restored.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = [(layer, _copied_attributes(layer)) for layer in module.modules()]

    def restore(self) -> None:
        """Restore the attributes and buffers to the same objects with the same content. Call it once."""
        for layer, attributes in self._layers:
            _restore(layer, attributes)


class SavedTensors:
    """The buffers and parameters of a module, with copies of their content.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = copy_buffers(module)
        self._parameters = [(p, p.detach().clone()) for p in module.parameters()]

    def restore(self, parameters: bool = True) -> None:
        """Restore the tensors to the same objects with the same content. It may be called several times.

        Args:
            parameters: whether to restore the parameters, too.
        """
        with torch.no_grad():
            for parameter, content in self._parameters if parameters else []:
                parameter.copy_(content)
        restore_buffers(self._buffers)


def generator_states(module: nn.Module) -> list[Any]:
    """Return the states of Python's and numpy's global random generators, and of those that a module has made."""
    made = [value for layer in module.modules() for value in vars(layer).values() if isinstance(value, GENERATORS)]
    return [random.getstate(), _comparable(np.random.get_state()), *map(_generator_state, made)]  # noqa: NPY002


def _generator_state(generator: Any) -> Any:
    """Return the state of a generator, comparable by `==`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return _comparable(generator.bit_generator.state)
    return _comparable(generator.get_state())


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _comparable(part) for key, part in state.items()}
    if isinstance(state, tuple):
        return [_comparable(part) for part in state]
    return state.tolist() if isinstance(state, np.ndarray | Tensor) else state


def _plain_attributes(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(layer).items():
        if name not in MODULE_ATTRIBUTES and (_is_plain(value) or isinstance(value, GENERATORS)):
            yield name, value


def _copied_attributes(layer: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return a layer's plain attributes and buffers, each with a copy of its content."""
    return {
        name: (value, _copied(value)) for name, value in {**dict(_plain_attributes(layer)), **layer._buffers}.items()
    }


def _restore(layer: nn.Module, attributes: Mapping[str, tuple[Any, Any]]) -> None:
    """Restore a layer's attributes to the same objects with the same content."""
    for name in [name for name, _ in _plain_attributes(layer) if name not in attributes]:
        delattr(layer, name)
    for name, (value, saved) in attributes.items():
        if isinstance(value, Tensor):
            if value.shape != saved.shape or not torch.equal(value, saved):
                with torch.no_grad():
                    _set_content(value, saved)
        elif isinstance(value, list):
            value[:] = saved
        elif isinstance(value, np.ndarray):
            value[...] = saved
        elif isinstance(value, deque):
            value.clear()
            value.extend(saved)
        elif isinstance(value, dict | set):
            value.clear()
            value.update(saved)
        elif isinstance(value, random.Random):
            value.setstate(saved)
        elif isinstance(value, np.random.Generator):
            value.bit_generator.state = saved
        elif isinstance(value, np.random.RandomState | torch.Generator):
            value.set_state(saved)
        (layer._buffers if name in layer._buffers else vars(layer))[name] = value


def _set_content(tensor: Tensor, content: Tensor) -> None:
    if tensor.shape != content.shape:
        tensor.resize_(content.shape)
    tensor.copy_(content)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | deque):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN_TYPES) or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        duplicate = copy(value)
        duplicate.update({name: _copied(part) for name, part in value.items()})
        return duplicate
    if isinstance(value, list | deque):
        return [_copied(part) for part in value]
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return dict(value.bit_generator.state)
    if isinstance(value, np.random.RandomState | torch.Generator):
        return value.get_state()
    return copy(value)
