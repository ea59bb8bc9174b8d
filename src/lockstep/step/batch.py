"""What a loader yields: one process's part of one optimizer step, as micro-batches."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from numpy.typing import NDArray
from torch import Tensor


@dataclass(slots=True, eq=False)
class MicroBatch:
    """A piece of a step: one forward and backward pass on one device.

    Attributes:
        ids: the samples' ids in the training set, int64 [n], 1 or more. They stay on the host.
        device: the device that computes it (its number over all nodes).
        piece: its number in the step.
        epochs: beside seed and id, what a sample's augmentation is keyed by: the epoch, and in balanced sampling the
            upper 32 bits say how often the epoch has taken the sample before. Int64 [n].
        batch: the collated samples as the dataset has them; images are `(uint8 [n, C, H, W], int64 [n])`.
        draws: uniforms in [0, 1) that augmentation is driven by, float32 [n, k]; None without augmentation.
    """

    ids: NDArray[np.int64]
    device: int
    piece: int
    epochs: NDArray[np.int64]
    batch: Any = None
    draws: Tensor | None = None

    @property
    def size(self) -> int:
        """Its samples."""
        return len(self.ids)


@dataclass(slots=True, eq=False)
class StepBatch:
    """What one process computes of one optimizer step.

    Attributes:
        micro_batches: those that have a sample; none where the step has fewer samples than processes.
        samples: samples of the whole step, over all processes.
        num_nonempty: pieces of the whole step that have a sample.
        epoch: 0-based.
        step: the optimizer step since the run began, 0-based.
        all_ranks_have_data: whether every process has a sample in this step.
        skipped: whether the step's gradient was not finite and changed nothing (`nonfinite=skip`); known after it.
    """

    micro_batches: list[MicroBatch]
    samples: int
    num_nonempty: int
    epoch: int
    step: int
    all_ranks_have_data: bool
    skipped: bool = False

    @property
    def num_local_samples(self) -> int:
        """Samples that this process computes."""
        return sum(micro_batch.size for micro_batch in self.micro_batches)

    def to(self, device: torch.device) -> "StepBatch":
        """One whose tensors lie on `device`."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "StepBatch":
        """One whose tensors lie in page-locked memory, from where a GPU fetches them in the background."""
        return self._moved(Tensor.pin_memory)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> "StepBatch":
        moved = apply_to_collection([(each.batch, each.draws) for each in self.micro_batches], Tensor, move)
        pairs = zip(self.micro_batches, moved, strict=True)
        micro_batches = [replace(each, batch=batch, draws=draws) for each, (batch, draws) in pairs]
        return replace(self, micro_batches=micro_batches)
