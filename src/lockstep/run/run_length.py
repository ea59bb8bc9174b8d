"""Compute how many steps and epochs a run has, and which key ends it."""

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
    per_epoch = DataOrder(samples, config.layout, config.seed).steps_per_epoch
    epochs, steps = config.length
    if epochs is not None and (steps is None or steps > epochs * per_epoch):
        return RunLength(epochs * per_epoch, epochs, "max_epochs")
    assert steps is not None
    return RunLength(steps, -(-steps // per_epoch), "max_steps")
