"""Compute how many steps and epochs a run has, which key ends it, and how small its pieces get."""

from dataclasses import dataclass
from typing import Literal

from lockstep.arithmetic.order import DataOrder
from lockstep.config import rules
from lockstep.config.check import Config


@dataclass(frozen=True)
class RunLength:
    """The length of a whole run, counted from its first step, also where it continues from a checkpoint.

    An evaluation trains no steps. Its length is that of a run of training with its config.
    """

    steps: int  # optimizer steps
    epochs: int  # passes over the training set; the last one may be cut short
    steps_per_epoch: int  # optimizer steps of a whole pass
    ends_by: Literal["max_epochs", "max_steps"]  # the key whose limit comes first; max_steps if both do


def run_length(config: Config, samples: int) -> RunLength:
    """Return how long a run on `samples` training samples is."""
    per_epoch = DataOrder(samples, config.layout, config.seed).steps_per_epoch
    epochs, steps = config.epoch_limit, config.max_steps
    if epochs is not None and (steps is None or steps > epochs * per_epoch):
        return RunLength(epochs * per_epoch, epochs, per_epoch, "max_epochs")
    assert steps is not None
    return RunLength(steps, -(-steps // per_epoch), per_epoch, "max_steps")


def smallest_piece(config: Config, samples: int) -> int:
    """Return the number of samples of a run's smallest piece. A short last step counts if the run reaches one."""
    length = run_length(config, samples)
    reaches_last_step = config.trains and length.steps >= length.steps_per_epoch
    return rules.smallest_piece(config.layout, samples, reaches_last_step)
