"""Passes of a piece beside those of a step, which leave no trace, and batches of some of its samples."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lockstep.step.buffers import copy_buffers, restore_buffers
from lockstep.step.lightning_quirks import without_logging
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
    with isolate_rng(include_cuda=False), _without_breakpoints(), without_logging(trainer):
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


class CannotRepeat(Exception):
    """A batch has a part of which the samples are unknown."""


def repeated(batch: Any, size: int, rows: range, times: int = 1) -> Any:
    """Return some samples of a batch, repeated.

    Args:
        batch: tensors with one row per sample, lists of other things with one for each sample, and containers of them.
            Numbers, strings and tensors of one element stay as they are.
        size: samples of the batch.
        rows: the positions of the samples that are repeated.
        times: how often they stand in the result.

    Raises:
        CannotRepeat: something has no part for each sample.
    """
    if isinstance(batch, Tensor):
        if batch.ndim and len(batch) == size:
            part = batch[rows.start : rows.stop] if rows.step == 1 else batch[list(rows)]
            return torch.cat([part] * times)
        if batch.numel() == 1:
            return batch
        raise CannotRepeat(f"a tensor of shape {list(batch.shape)} is not one row for each of {size} samples")
    if isinstance(batch, Mapping):
        changed = {key: repeated(value, size, rows, times) for key, value in batch.items()}
        return changed if type(batch) is dict else type(batch)(changed)  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        by_sample = len(batch) == size and all(not isinstance(each, Tensor | Mapping | list | tuple) for each in batch)
        if by_sample and size > 1:
            return type(batch)([batch[row] for row in rows] * times)
        changed_parts = [repeated(value, size, rows, times) for value in batch]
        return type(batch)(*changed_parts) if hasattr(batch, "_fields") else type(batch)(changed_parts)
    if batch is None or isinstance(batch, bool | int | float | str | bytes):
        return batch
    raise CannotRepeat(f"the samples of a {type(batch).__name__} are unknown")
