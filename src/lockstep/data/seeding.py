"""Random generators of a data set and its transforms: where they are, and their seeding."""

import random
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from lockstep.launch.failures import is_user_code
from lockstep.step.strategy import seed_python_and_numpy

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
CONTAINERS = (list, tuple, set, frozenset, dict)
SKIPPED = (type, ModuleType, torch.Tensor, np.ndarray, str, bytes, bool, int, float, pl.LightningModule, pl.Trainer)
LARGE = 1000  # values of a container that is not searched: they are samples
MOST = 10_000  # objects that are searched


def seed_all(key: int) -> None:
    """Seed the global generators of Python, numpy and torch."""
    seed_python_and_numpy(key)
    torch.random.default_generator.manual_seed(key >> 1)


def seed_generator(generator: Any, key: int) -> None:
    """Seed a generator that is not a global one."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(key >> 1)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(key).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(key & 0xFFFFFFFF)
    else:
        generator.seed(key)


class Generators:
    """The generators that a data set's objects have made, such as those of albumentations and MONAI.

    They are attributes of the data set, of its transforms, of objects and containers in them and of their classes, and
    what a user's functions read from their closures and modules.

    Args:
        dataset: the data set.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._searches = 0
        self._places: list[tuple[Any, Any]] = []

    def seed(self, key: int) -> None:
        """Seed the generators that are there now."""
        for holder, name in self._places:
            generator = _value(holder, name)
            if isinstance(generator, GENERATORS):
                seed_generator(generator, key)

    def search(self) -> bool:
        """Search for them, at the first two calls: an object may make its generator at its first sample.

        Returns:
            Whether the second search has found more.
        """
        if self._searches == 2:
            return False
        self._searches += 1
        before, self._places = self._places, list(_places(self._dataset))
        return self._searches == 2 and len(self._places) > len(before)

    def __getstate__(self) -> dict[str, Any]:
        return {"_dataset": self._dataset, "_searches": 0, "_places": []}


def _places(root: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the holders of generators that can be reached from an object, each with the attribute, key or index."""
    seen: dict[int, Any] = {}
    waiting = [root]
    while waiting and len(seen) < MOST:
        holder = waiting.pop()
        if id(holder) in seen or isinstance(holder, (*SKIPPED, *GENERATORS)) or holder is None:
            continue
        seen[id(holder)] = holder
        for name, value in contents_of(holder):
            if isinstance(value, GENERATORS):
                yield holder, name
            else:
                waiting.append(value)


def contents_of(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what an object has, by attribute, key or index."""
    if isinstance(holder, CONTAINERS):
        if len(holder) <= LARGE:
            yield from list(holder.items() if isinstance(holder, dict) else enumerate(holder))
        return
    if isinstance(holder, MethodType):
        yield "__self__", holder.__self__
        yield "__func__", holder.__func__
    elif isinstance(holder, FunctionType):
        for number, cell in enumerate(holder.__closure__ or ()):
            try:
                yield number, cell.cell_contents
            except ValueError:  # not set yet
                continue
        if is_user_code(holder.__code__.co_filename):
            names = holder.__code__.co_names
            yield from [(name, holder.__globals__[name]) for name in names if name in holder.__globals__]
    elif isinstance(holder, partial):
        yield from (("func", holder.func), ("args", holder.args), ("keywords", holder.keywords))
    else:
        yield from list(getattr(holder, "__dict__", {}).items())
        for kind in type(holder).__mro__:
            for name, value in list(vars(kind).items()):
                if isinstance(value, GENERATORS) or (isinstance(value, FunctionType) and _is_users(value)):
                    yield name, value


def _is_users(function: FunctionType) -> bool:
    return is_user_code(function.__code__.co_filename)


def _value(holder: Any, name: Any) -> Any:
    """Return what a holder has now under a name of `contents_of`."""
    try:
        if isinstance(holder, FunctionType):
            closure: Any = holder.__closure__
            return closure[name].cell_contents if isinstance(name, int) else holder.__globals__[name]
        if isinstance(holder, CONTAINERS):
            return holder[name] if isinstance(holder, dict) else list(holder)[name]
        return getattr(holder, name)
    except (AttributeError, LookupError, ValueError):
        return None
