"""What a step asks of the strategy that computes it and of the data module that feeds it.

Rooms above offer it: `lockstep.strategies.base.PieceStrategy` and `lockstep.data.DataModule`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor

from lockstep.arithmetic.deal import Deal
from lockstep.arithmetic.layout import Layout
from lockstep.arithmetic.order import DataOrder
from lockstep.step.batch import MicroBatch, StepBatch
from lockstep.step.hooks import StepHook

Gradients = list[Tensor | None]  # by parameter; None: nothing has reached it


class Action(Enum):
    """A pass of a micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"


class StepStrategy(Protocol):
    """Runs a micro-batch, and gives the order of the passes.

    Attributes:
        staged: whether each process holds another part of the network, and sees all samples.
        numbers_come_later: whether a piece's loss is known only when its backward pass is due: then `training_step` is
            run again, without gradients.
        outdated: whether other parameters are trained than the strategy was set up for.
        hooks: of the trainer's steps.
    """

    staged: bool
    numbers_come_later: bool
    hooks: Sequence[StepHook]

    @property
    def outdated(self) -> bool: ...

    @property
    def root_device(self) -> torch.device: ...

    @property
    def lightning_module(self) -> Any: ...

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]: ...

    def schedule(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Action, int]]:
        """Yield the order of the passes of a step's micro-batches, by their numbers."""

    def micro_batch(self, micro_batch: MicroBatch, seed: int) -> AbstractContextManager[None]:
        """Return the context of a micro-batch's forward pass: layers draw from generators with this seed."""

    def seed(self, seed: int) -> None:
        """Seed the generators of the device to which batches come."""

    def start_reducer(self, first: bool) -> None:
        """Have gradients summed over all processes in the passes that follow; they are a step's `first`."""

    def finish_reducer(self) -> None:
        """After those passes."""

    def holds(self, thing: Any) -> bool:
        """Whether this process has a parameter or layer, which it computes with."""

    def gathered(self, own: dict[Any, Any]) -> dict[Any, Any]:
        """Return what the processes hold that have different parts of a network, on rank zero. All call it."""

    def computing_with(self, module: Any) -> AbstractContextManager[None]:
        """Inside, another object with the module's parameters computes in its place."""


class StepData(Protocol):
    """Gives a step its samples.

    Attributes:
        layout: of the run.
        deal: who computes which piece at each step.
        order: of the training samples.
    """

    layout: Layout
    deal: Deal
    order: DataOrder

    @property
    def mixes(self) -> bool:
        """Whether a piece's samples are mixed."""

    def mix(self, batch: Any) -> Any:
        """Return a piece's batch with its samples mixed."""

    def finish(self, micro_batch: MicroBatch) -> Any:
        """Return what `training_step` gets of a micro-batch on its device: augmented and normalised."""

    def fetch_piece(self, step_batch: StepBatch, piece: int, device: int) -> MicroBatch:
        """Fetch a piece of the step alone, for a device (its number over all nodes) of this process."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any: ...

    def samples_here(self, split: str) -> int:
        """Return how many samples of `val` or `test` this process evaluates."""


def data_of(trainer: pl.Trainer) -> StepData:
    """Return a trainer's data module."""
    data: StepData = trainer.datamodule  # type: ignore[attr-defined]
    return data
