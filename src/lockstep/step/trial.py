"""Passes of a piece beside those of a step, which leave no trace."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng

from lockstep.step.buffers import copy_buffers, restore_buffers
from lockstep.step.module_state import SavedAttributes, SavedTensors
from lockstep.step.passes import Step
from lockstep.step.strategy import generators


@contextmanager
def trial_passes(step: Step, compiled: bool = False) -> Iterator[SavedTensors]:
    """Return the context of passes that leave no trace. It gives the weights and buffers before them."""
    tensors = SavedTensors(step.module)
    with ExitStack() as stack:
        stack.enter_context(without_traces(step.trainer))
        if compiled:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield tensors
        finally:
            tensors.restore()


@contextmanager
def without_traces(trainer: Any) -> Iterator[None]:
    """Return the context of passes that change parameters and gradients only: no buffer, attribute, random generator.

    Nor do they log.
    """
    module, device_generators = trainer.lightning_module, generators(trainer.strategy.root_device)
    states = [generator.get_state() for generator in device_generators]
    attributes, buffers = SavedAttributes(module), copy_buffers(module)
    with isolate_rng(include_cuda=False), _without_breakpoints(), trainer.without_logging():
        try:
            yield
        finally:
            restore_buffers(buffers)
            attributes.restore()
            for generator, state in zip(device_generators, states, strict=True):
                generator.set_state(state)


@contextmanager
def _without_breakpoints() -> Iterator[None]:
    """Let `breakpoint()` do nothing: it would show some samples of a piece, and not the first step."""
    hook, sys.breakpointhook = sys.breakpointhook, lambda *_, **__: None
    try:
        yield
    finally:
        sys.breakpointhook = hook
