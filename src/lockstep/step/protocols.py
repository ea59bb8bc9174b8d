"""The interfaces of a step to its strategy and its data module.

Upper rooms implement them: `lockstep.strategies.base.PieceStrategy` and `lockstep.data.DataModule`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor

from lockstep.arithmetic.assignment import Assignment
from lockstep.arithmetic.layout import Layout
from lockstep.arithmetic.order import DataOrder
from lockstep.step.batch import MicroBatch, StepBatch
from lockstep.step.hooks import StepHook

Gradients = list[Tensor | None]  # by parameter; None: it has no gradient


class Action(Enum):
    """A pass of a micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"


class StepStrategy(Protocol):
    """Runs micro-batches and gives the order of their passes.

    Attributes:
        staged: whether each process has another part of the network and sees all samples.
        repeats_training_step: whether `training_step` runs once more before the backward pass, without gradients. In a
            process with an earlier stage of the network, the first call ends with the stage's output, and the second
            one gets the network's output and returns the loss.
        hooks: the hooks of the trainer's steps.
    """

    staged: bool
    repeats_training_step: bool
    hooks: Sequence[StepHook]

    @property
    def trained_parameters_changed(self) -> bool:
        """True if parameters were frozen or unfrozen since the strategy was set up."""

    @property
    def root_device(self) -> torch.device:
        """The device of the module."""

    @property
    def lightning_module(self) -> Any:
        """The module that is trained."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers; a run has one."""

    def schedule(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Action, int]]:
        """Yield the passes of a step's micro-batches in order, each with the index of its micro-batch."""

    def micro_batch(self, micro_batch: MicroBatch, seed: int) -> AbstractContextManager[None]:
        """Return the context of a micro-batch's forward pass, with the device's generators seeded by `seed`."""

    def seed(self, seed: int) -> None:
        """Seed the generators of the device to which batches are moved."""

    def start_reducer(self, first: bool) -> None:
        """Sum gradients over all processes during the next passes.

        Args:
            first: whether these are the first passes of a step.
        """

    def finish_reducer(self) -> None:
        """End the part that `start_reducer` began."""

    def holds(self, thing: Any) -> bool:
        """Check whether this process has a parameter or layer and computes with it."""

    def gather_parts(self, local_values: dict[Any, Any]) -> dict[Any, Any]:
        """Gather the values of processes with different parts of the network on rank zero. Every process calls this."""

    def computing_with(self, module: Any) -> AbstractContextManager[None]:
        """Return a context in which `module`, an object with the same parameters, computes in the module's place."""


class StepData(Protocol):
    """Gives a step its samples.

    Attributes:
        layout: the run's layout.
        assignment: assigns the pieces of each step to devices.
        order: the order of the training samples.
    """

    layout: Layout
    assignment: Assignment
    order: DataOrder

    @property
    def mixes(self) -> bool:
        """True if a piece's samples are mixed."""

    def mix(self, batch: Any) -> Any:
        """Return a piece's batch with its samples mixed."""

    def prepare(self, micro_batch: MicroBatch) -> Any:
        """Return the batch of a micro-batch for `training_step`: augmented and normalised."""

    def fetch_piece(self, step_batch: StepBatch, piece: int, device: int) -> MicroBatch:
        """Fetch one piece of a step. `device` is one of this process; devices are counted over all nodes."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to a device."""

    def samples_here(self, split: str) -> int:
        """Return the number of samples of `val` or `test` that this process evaluates."""


def data_of(trainer: pl.Trainer) -> StepData:
    """Return a trainer's data module."""
    data: StepData = trainer.datamodule  # type: ignore[attr-defined]
    return data
