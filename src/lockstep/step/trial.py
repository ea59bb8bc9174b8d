"""Passes of a piece beside those of a step, which leave no trace: what they change is saved before, restored after."""

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from copy import copy
from enum import Enum
from itertools import chain
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lockstep.launch.failures import is_user_code
from lockstep.step.buffers import copy_buffers, restore_buffers
from lockstep.step.strategy import generators_restored

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # attributes that every module has
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), np.ndarray)
LARGE = 100_000  # elements of an object's attribute that is not saved
FOREIGN = (type, ModuleType, FunctionType, Enum, nn.Module, Tensor, Dataset, DataLoader, pl.Callback, pl.Trainer)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class Saved(NamedTuple):
    """What a module had before trial passes."""

    tensors: "SavedTensors"
    attributes: "SavedAttributes"


@contextmanager
def trial_passes(module: nn.Module, trainer: Any = None, compiled: bool = False) -> Iterator[Saved]:
    """Return the context of passes that leave no trace. It gives what the module has before them.

    Args:
        module: the module.
        trainer: the trainer that trains it; None: none does.
        compiled: whether torch has compiled the networks. They run uncompiled.
    """
    tensors = SavedTensors(module)
    with without_traces(module, trainer) as attributes:
        try:
            with torch.compiler.set_stance("force_eager") if compiled else ExitStack():
                yield Saved(tensors, attributes)
        finally:
            tensors.restore()


@contextmanager
def without_traces(module: nn.Module, trainer: Any = None) -> Iterator["SavedAttributes"]:
    """Return the context of passes that change parameters and gradients only: no buffer, attribute, random generator.

    Nor do they log.
    """
    device = trainer.strategy.root_device if trainer else torch.device("cpu")
    owner = getattr(getattr(trainer, "datamodule", None), "owner", None)  # whose hooks of a batch's transfer are called
    attributes, quiet = SavedAttributes(module, owner), trainer.without_logging() if trainer else ExitStack()
    with generators_restored(device), _without_breakpoints(), quiet:
        try:
            yield attributes
        finally:
            attributes.restore()


@contextmanager
def modes_restored(module: nn.Module) -> Iterator[None]:
    """Return a context after which each layer of a module is in training or evaluation mode as before."""
    modes = [(layer, layer.training) for layer in module.modules()]
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training


@contextmanager
def _without_breakpoints() -> Iterator[None]:
    """Let `breakpoint()` do nothing: it would show some samples of a piece, and not the first step."""
    hook, sys.breakpointhook = sys.breakpointhook, lambda *_, **__: None
    try:
        yield
    finally:
        sys.breakpointhook = hook


class SavedAttributes:
    """The plain Python attributes and the buffers of a module's layers, with copies of their content.

    So are the plain attributes of objects of a user's own classes that a layer has, such as an average or a schedule.
    Large ones of these objects, such as the images of a data set, are neither saved nor restored. Modules in lists and
    dicts of a layer, such as metrics, count as layers.

    Until `restore`, a `Peeked` stands in the place of an iterator that a layer or such an object has, also in a list or
    dict. Then it gives the values again that passes have taken.

    Args:
        module: the module.
        others: other objects of a user's own classes, such as the data module.
    """

    def __init__(self, module: nn.Module, *others: Any) -> None:
        self._iterators = [(place, key, place[key]) for place, key in _iterator_places(module, Iterator)]
        for place, key, iterator in self._iterators:
            place[key] = Peeked(iterator)
        kept = [module, *hidden_modules(module)]
        self._buffers = [buffer for each in kept for buffer in copy_buffers(each)]
        layers = [layer for each in kept for layer in each.modules()]
        self._layers = [(layer, _copied_all(_plain_attributes(layer))) for layer in layers]
        objects = _users_objects([*others, *(value for layer in layers for value in vars(layer).values())])
        self._objects = [(each, _copied_all(_small(each))) for each in objects]

    def changed(self) -> list[str]:
        """Return the names of the attributes, but of random generators, that have another content now."""
        now = [(list(_plain_attributes(layer)), before) for layer, before in self._layers]
        now += [(_small(each), before) for each, before in self._objects]
        return [
            name
            for attributes, before in now
            for name, value in attributes
            if not isinstance(value, GENERATORS)
            and (name not in before or _comparable(value) != _comparable(before[name][1]))
        ]

    def rewind(self) -> None:
        """Restore the attributes and buffers to the same objects with the same content, but no iterators."""
        restore_buffers(self._buffers)
        for layer, attributes in self._layers:
            _restore(layer, attributes, [name for name, _ in _plain_attributes(layer)])
        for each, attributes in self._objects:
            _restore(each, attributes, [name for name, _ in _small(each)])

    def restore(self) -> None:
        """Restore the attributes, buffers and iterators. Call it once."""
        self.rewind()
        for place, key, iterator in self._iterators:
            peeked = place[key]
            if isinstance(peeked, Peeked) and peeked.iterator is iterator:  # else user code has set another one
                place[key] = chain(peeked.taken, iterator) if peeked.taken else iterator


class Peeked:
    """An iterator that records the values that are taken from another one.

    Args:
        iterator: the other one. Its attributes are attributes of this one, too.

    Attributes:
        iterator: the argument.
        taken: the values.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator
        self.taken: list[Any] = []

    def __iter__(self) -> "Peeked":
        return self

    def __next__(self) -> Any:
        self.taken.append(next(self.iterator))
        return self.taken[-1]

    def __getattr__(self, name: str) -> Any:
        if name == "iterator":
            raise AttributeError(name)
        return getattr(self.iterator, name)


def peeked_iterators(module: nn.Module) -> list[str]:
    """Return the names of the attributes, or keys, whose iterators passes have advanced since `SavedAttributes`."""
    return [str(key) for place, key in _iterator_places(module, Peeked) if place[key].taken]


def _iterator_places(module: nn.Module, kind: Any) -> list[tuple[Any, Any]]:
    """Return the dicts and lists that have an iterator of a class, each with its key or index."""
    holders: list[Any] = [vars(layer) for layer in module.modules()]
    holders += [vars(each) for each in _users_objects(value for layer in holders for value in layer.values())]
    containers = [value for holder in holders for value in holder.values() if type(value) in (dict, list)]
    return [
        (holder, key)
        for holder in (*holders, *(each for each in containers if len(each) <= LARGE))
        for key, value in (holder.items() if isinstance(holder, dict) else enumerate(holder))
        if isinstance(value, kind) and not isinstance(value, FOREIGN)
    ]


def hidden_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules that layers have in lists, tuples and dicts, and that are no layers: metrics, or a teacher."""
    hidden: list[nn.Module] = []
    known = {id(each) for each in module.modules()}
    waiting = [value for layer in module.modules() for value in vars(layer).values()]
    seen: dict[int, Any] = {}
    while waiting:
        value = waiting.pop()
        if not isinstance(value, dict | list | tuple) or id(value) in seen or len(value) > LARGE:
            continue
        seen[id(value)] = value
        for each in value.values() if isinstance(value, dict) else value:
            if not isinstance(each, nn.Module):
                waiting.append(each)
            elif id(each) not in known:
                hidden.append(each)
                known |= {id(layer) for layer in each.modules()}
                waiting += [value for layer in each.modules() for value in vars(layer).values()]
    return hidden


class SavedTensors:
    """The buffers and parameters of a module, with copies of their content; also those of `hidden_modules`.

    Args:
        module: the module.

    Attributes:
        parameters: each parameter and its copy.
    """

    def __init__(self, module: nn.Module) -> None:
        hidden = hidden_modules(module)
        self._buffers = [buffer for each in (module, *hidden) for buffer in copy_buffers(each)]
        self._hidden = [(p, p.detach().clone()) for each in hidden for p in each.parameters()]
        # One that another stage holds is an element, expanded to its shape: it has no content and can't be written.
        self.parameters = [(p, p.detach().clone()) for p in module.parameters() if not _is_expanded(p)]
        self._places = [
            (layer._parameters, name, parameter)
            for layer in module.modules()
            for name, parameter in layer._parameters.items()
            if parameter is not None and not parameter.requires_grad
        ]

    def restore(self, parameters: bool = True) -> None:
        """Restore the tensors to the same objects with the same content. It may be called several times.

        Args:
            parameters: whether to restore the parameters with a gradient, too.
        """
        for place, name, parameter in self._places:  # a pass may have set another one
            if place.get(name) is not parameter:
                place[name] = parameter
        with torch.no_grad():
            for parameter, content in self._hidden:
                parameter.copy_(content)
            for parameter, content in self.parameters:
                if parameters or not parameter.requires_grad:
                    parameter.copy_(content)
        restore_buffers(self._buffers)


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share one place in memory."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def generator_states(module: nn.Module) -> dict[str, Any]:
    """Return the states of Python's and numpy's global random generators, and of those that a module has made."""
    made = {name: value for layer in module.modules() for name, value in vars(layer).items()}
    named = {name: value for name, value in made.items() if isinstance(value, GENERATORS)}
    states = {name: _comparable(_copied(value)) for name, value in named.items()}
    return {"Python's random": random.getstate(), "numpy's np.random": _comparable(np.random.get_state()), **states}  # noqa: NPY002


def _comparable(value: Any) -> Any:
    """Return a value, or the state of a generator, comparable by `==`."""
    if isinstance(value, dict):
        return {key: _comparable(part) for key, part in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_comparable(part) for part in value]
    return value.tolist() if isinstance(value, np.ndarray | Tensor) else value


def _plain_attributes(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(layer).items():
        if name not in MODULE_ATTRIBUTES and (_is_plain(value) or isinstance(value, GENERATORS)):
            yield name, value


def _copied_all(attributes: Iterable[tuple[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """Return attributes by name, each with a copy of its content."""
    return {name: (value, _copied(value)) for name, value in attributes}


def _users_objects(values: Iterable[Any]) -> list[Any]:
    """Return the objects of a user's own classes among some values, in their containers, and in such objects."""
    objects: list[Any] = []
    seen: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        if isinstance(value, dict | list | tuple | set | deque):
            seen[id(value)] = value
            if len(value) <= LARGE:
                waiting += value.values() if isinstance(value, dict) else value
        elif _is_users(value):
            seen[id(value)] = value
            objects.append(value)
            waiting += vars(value).values()
    return objects


def _is_users(value: Any) -> bool:
    """Check whether a value is an object with attributes, of a class of the user or a plain namespace."""
    if isinstance(value, SimpleNamespace):
        return True
    if not hasattr(value, "__dict__") or isinstance(value, FOREIGN):
        return False
    home = type(value).__module__
    file = getattr(sys.modules.get(home), "__file__", None)
    return is_user_code(file) if file else home == "__main__"


def _small(holder: Any) -> list[tuple[str, Any]]:
    """Return the plain attributes of an object that are not large."""
    plain = [(name, value) for name, value in vars(holder).items() if _size(value) <= LARGE and _is_plain(value)]
    generators = [(name, value) for name, value in vars(holder).items() if isinstance(value, GENERATORS)]
    return [*plain, *generators]


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    return int(value.size) if isinstance(value, np.ndarray) else len(value) if isinstance(value, Sized) else 1


def _restore(layer: Any, attributes: Mapping[str, tuple[Any, Any]], now: Iterable[str]) -> None:
    """Restore an object's attributes to the same objects with the same content; `now` are the names it has now."""
    for name in [name for name in now if name not in attributes]:
        vars(layer).pop(name)
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
        vars(layer)[name] = value


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
