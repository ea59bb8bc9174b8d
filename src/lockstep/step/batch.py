"""What a loader yields, one process's part of one optimizer step, and the interface of the data module."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from numpy.typing import NDArray
from torch import Tensor

from lockstep.arithmetic.layout import Assignment, Layout
from lockstep.arithmetic.order import DataOrder


@dataclass(slots=True, eq=False)
class MicroBatch:
    """A piece of a step: one forward and backward pass on one device.

    Attributes:
        ids: the samples' ids in the training set, int64 [n], at least one. They stay on the host.
        device: number of the device that computes it, over all nodes.
        piece: its number in the step.
        epochs_and_repeats: the number for each sample that makes its random numbers differ between its uses, int64 [n]:
            in the lower 32 bits the epoch, in the upper how often this epoch has used the sample before (0, except with
            balanced sampling).
        batch: the collated samples as the data set returns them; of images `(uint8 [n, C, H, W], int64 [n])`.
        augmentation_numbers: random numbers in [0, 1) for `Augment`, float32 [n, k]; None without augmentation.
    """

    ids: NDArray[np.int64]
    device: int
    piece: int
    epochs_and_repeats: NDArray[np.int64]
    batch: Any = None
    augmentation_numbers: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.ids)


@dataclass(slots=True, eq=False)
class StepBatch:
    """One process's part of one optimizer step.

    Attributes:
        micro_batches: the micro-batches of this process that have a sample. It may be empty if a short last step has
            fewer samples than processes.
        samples: samples of the whole step, over all processes.
        num_nonempty: pieces of the whole step that have a sample.
        epoch: 0-based.
        step: the number of the optimizer step since the run began, 0-based.
        all_ranks_have_data: whether every process has a sample in this step.
        most_micro_batches: the number of micro-batches of the process that has most of them.
        skipped: whether the gradient was not finite and the step was skipped (`nonfinite=skip`). Set during the step.
        returned: the numbers that `training_step` has returned for each micro-batch. Set during the step.
    """

    micro_batches: list[MicroBatch]
    samples: int
    num_nonempty: int
    epoch: int
    step: int
    all_ranks_have_data: bool
    most_micro_batches: int = 0
    skipped: bool = False
    returned: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def num_local_samples(self) -> int:
        """Number of samples that this process computes."""
        return sum(micro_batch.size for micro_batch in self.micro_batches)

    def to(self, device: torch.device) -> "StepBatch":
        """Return a copy with its tensors on `device`."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "StepBatch":
        """Return a copy with its tensors in page-locked memory, from which a GPU copies asynchronously.

        Tensors that are on a GPU already stay there.
        """
        return self._moved(lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> "StepBatch":
        tensors = [(each.batch, each.augmentation_numbers) for each in self.micro_batches]
        pairs = zip(self.micro_batches, apply_to_collection(tensors, Tensor, move), strict=True)
        micro_batches = [replace(each, batch=batch, augmentation_numbers=numbers) for each, (batch, numbers) in pairs]
        return replace(self, micro_batches=micro_batches)


class EvaluationShare(NamedTuple):
    """The part of an evaluation set that one process evaluates. Both numbers are 0 if there are too few samples."""

    batches: int
    samples: int


class StepData(Protocol):
    """What a step needs of its data module; `lockstep.data.StepDataModule` implements it.

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

    def num_local_samples(self, split: str) -> int:
        """Return the number of samples of `val` or `test` that this process evaluates."""

    def samples_of_batch(self, split: str, batch_idx: int) -> int:
        """Return the number of samples of a batch of `val` or `test` that this process evaluates."""

    def evaluation_shares(self, split: str) -> tuple[EvaluationShare, ...]:
        """Return what each process evaluates of `val` or `test`, in rank order."""


def data_of(trainer: Any) -> StepData:
    """Return a trainer's data module."""
    data: StepData = trainer.datamodule
    return data
