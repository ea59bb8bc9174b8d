"""What a step asks of the strategy that runs its passes, and the random numbers of pieces."""

import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lockstep.arithmetic.layout import Action
from lockstep.errors import StepRefused
from lockstep.step.batch import MicroBatch

T = TypeVar("T")


def generators(device: torch.device) -> list[torch.Generator]:
    """Return the random generators of a piece on `device`: the device's, and the host's, from which mixup draws."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the generators of a piece on `device`."""
    for generator in generators(device):
        generator.manual_seed(seed)


@contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """Return a context after which the global generators of Python, numpy and torch, and a device's, are as before."""
    states = [(generator, generator.get_state()) for generator in generators(device)]
    with isolate_rng(include_cuda=False):
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)


def seed_python_and_numpy(key: int) -> None:
    """Seed the global generators of Python and numpy, from which users' code draws. A key has up to 64 bits."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002  users' hooks, transforms and samplers draw from it


class PieceStrategy:
    """What a step asks of the strategy that runs its passes. Here each process has all weights, and needs no other one.

    `lockstep.lightning.strategy` derives such strategies from Lightning's.

    Attributes:
        name: the layout's name of the strategy.
        weights: what this process has of the weights, and of their gradient; see `Layout`.
        less_memory: a setting with which the weights take less memory; empty: there is none.
        changing_parameters: names of the parameters without a gradient that `training_step` may change in this step.
        lightning_module: the module that is trained.
    """

    name: str
    weights: str
    less_memory = ""
    changing_parameters: Collection[str] = ()
    lightning_module: Any
    _inside = False  # whether a micro-batch's forward pass runs, in which collectives are refused

    @property
    def root_device(self) -> torch.device:
        """The process's device, or the first one."""
        raise NotImplementedError

    @property
    def current_device(self) -> torch.device:
        """The device of the current micro-batch."""
        return self.root_device

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank zero."""
        raise NotImplementedError

    def schedule(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Action, int]]:
        """Yield the passes of a step's micro-batches in order, each with the index of its micro-batch."""
        raise NotImplementedError

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch, seed: int) -> Iterator[None]:
        """Return the context of a micro-batch's forward pass, with the device's generators seeded by `seed`."""
        seed_device(seed, self.current_device)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def use_reducer(self, wanted: bool) -> bool:
        """Choose whether the last passes of the next step sum its gradients over all processes. Only ddp can.

        Returns:
            Whether they will.
        """
        return False

    def passes_communicate(self) -> bool:
        """Return whether a pass needs the other processes, even where the module has all its weights."""
        return False

    def holds(self, thing: Any) -> bool:
        """Check whether this process has a parameter or layer and computes with it."""
        return True

    def gather_dicts(self, local_values: dict[T, Any]) -> dict[T, Any]:
        """Merge the dicts of processes that have different parts, on rank zero. Every process calls this.

        Keys of different parts differ, or they are names of parameters, of which each value is a part.
        """
        return local_values

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Return a context in which the module has all its weights, so that a pass needs no other process.

        What changes in them stays. Every process enters and leaves it, and changes the same.
        """
        yield

    def local_part(self, tensor: Tensor) -> Tensor:
        """Return this process's part of a parameter or of its gradient. Here it is all of it."""
        return tensor

    def refuse_collective(self, what: str, remedy: str) -> None:
        """Raise an error if the ranks may now start different numbers of collectives; on one device too.

        Args:
            what: what the user's code does, as in `training_step can't <what>`.
            remedy: what would be right in an evaluation.

        Raises:
            StepRefused: a micro-batch's forward pass runs.
        """
        if self._inside:
            raise StepRefused(
                f"training_step can't {what}, since ranks may have unequal numbers of pieces: return the number beside "
                "the loss, and the run logs its mean over all samples"
            )


def proxy(thing: Any, overrides: type) -> Any:
    """Return an object that shares the attributes of `thing` and has other methods. `thing` does not change.

    Its methods are those of `overrides`; the methods that `overrides` lacks are those of `thing`.
    """
    kind: Any = type(thing)
    instance = object.__new__(_proxy_class(kind, overrides))
    object.__setattr__(instance, "__dict__", thing.__dict__)
    return instance


@cache
def _proxy_class(kind: type, overrides: type) -> Any:
    return type(kind.__name__, (overrides, kind), {})
