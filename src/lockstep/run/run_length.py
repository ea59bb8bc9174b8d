"""Compute how many steps and epochs a run has, which key ends it, and how small its pieces get."""

import sys
from dataclasses import dataclass
from typing import Literal

from lockstep.arithmetic.order import DataOrder
from lockstep.config.check import Config


@dataclass(frozen=True)
class RunLength:
    """The length of a whole run, counted from its first step, also where it continues from a checkpoint."""

    steps: int  # optimizer steps
    epochs: int  # passes over the training set; the last one may be cut short
    ends_by: Literal["max_epochs", "max_steps"]  # the key whose limit comes first; max_steps if both do


def run_length(config: Config, samples: int) -> RunLength:
    """Return how long a run on `samples` training samples is."""
    per_epoch = steps_per_epoch(config, samples)
    epochs, steps = config.epoch_limit, config.max_steps
    if epochs is not None and (steps is None or steps > epochs * per_epoch):
        return RunLength(epochs * per_epoch, epochs, "max_epochs")
    assert steps is not None
    return RunLength(steps, -(-steps // per_epoch), "max_steps")


def steps_per_epoch(config: Config, samples: int) -> int:
    """Return the optimizer steps of one pass over the training set."""
    return DataOrder(samples, config.layout, config.seed).steps_per_epoch


def total_steps(config: Config, samples: int) -> int:
    """Return the optimizer steps of the whole run.

    An evaluation has no steps. Return a huge number, so that a module's check like `warmup < total_steps` passes.
    """
    if not config.trains:
        return sys.maxsize
    return run_length(config, samples).steps


def smallest_piece(config: Config, samples: int) -> int:
    """Return the number of samples of a run's smallest piece. A short last step counts if the run reaches one."""
    size, pieces = config.layout.batch_size, config.layout.pieces
    tail = samples % size if config.trains and total_steps(config, samples) >= steps_per_epoch(config, samples) else 0
    return min(max(1, step // pieces) for step in (size, tail or size))
