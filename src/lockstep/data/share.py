"""What a loader yields: one process's share of one optimizer step, turn by turn.

Plain classes with slots: Lightning moves batches with `apply_to_collection`, which deep-copies dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from numpy.typing import NDArray
from torch import Tensor

Move = Callable[[Tensor], Tensor]


class Turn:
    """One forward and backward pass of one process: a piece, or under dp a piece per device.

    Attributes:
        batch: the collated samples as the dataset has them; images are `(uint8 [n, C, H, W], int64 [n])`.
        ids: the samples' ids in the training set, int64 [n]. They stay on the host.
        draws: uniforms in [0, 1) that augmentation is driven by, float32 [n, k]; None without augmentation.
        devices: for each piece, the device that computes it (its number over all nodes).
        pieces: the pieces' numbers in the step. `batch` holds them one after the other.
        sizes: for each piece its samples, 1 or more.
    """

    __slots__ = ("batch", "devices", "draws", "ids", "pieces", "sizes")

    def __init__(
        self,
        batch: Any,
        ids: NDArray[np.int64],
        draws: Tensor | None,
        devices: tuple[int, ...],
        pieces: tuple[int, ...],
        sizes: tuple[int, ...],
    ) -> None:
        self.batch = batch
        self.ids = ids
        self.draws = draws
        self.devices = devices
        self.pieces = pieces
        self.sizes = sizes

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Turn:
        """A turn whose tensors lie on `device`; from page-locked memory where nobody waits."""
        locks = non_blocking and torch.device(device).type == "cuda"

        def move(tensor: Tensor) -> Tensor:
            if locks and not tensor.is_cuda and not tensor.is_pinned():
                tensor = tensor.pin_memory()
            return tensor.to(device, non_blocking=non_blocking)

        return self._moved(move)

    def pin_memory(self) -> Turn:
        """A turn whose tensors lie in page-locked memory, from where a GPU fetches them in the background."""
        return self._moved(Tensor.pin_memory)

    def _moved(self, move: Move) -> Turn:
        batch = apply_to_collection(self.batch, Tensor, move)
        draws = None if self.draws is None else move(self.draws)
        return Turn(batch, self.ids, draws, self.devices, self.pieces, self.sizes)


class Share:
    """What one process computes of one optimizer step.

    Attributes:
        turns: the turns that have a sample; none where the step has fewer samples than processes.
        samples: samples of the whole step, over all processes.
        pieces: pieces of the whole step that have a sample.
        cut: pieces that the whole step was cut into.
        epoch: 0-based.
        step: the optimizer step since the run began, 0-based.
        everyone: whether every process has a sample in this step.
    """

    __slots__ = ("cut", "epoch", "everyone", "pieces", "samples", "step", "turns")

    def __init__(
        self, turns: list[Turn], samples: int, pieces: int, epoch: int, step: int, everyone: bool, cut: int
    ) -> None:
        self.turns = turns
        self.samples = samples
        self.pieces = pieces
        self.epoch = epoch
        self.step = step
        self.everyone = everyone
        self.cut = cut

    @property
    def own(self) -> int:
        """Samples that this process computes."""
        return sum(sum(turn.sizes) for turn in self.turns)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Share:
        """A share whose tensors lie on `device`."""
        return self._with([turn.to(device, non_blocking) for turn in self.turns])

    def pin_memory(self) -> Share:
        """A share whose tensors lie in page-locked memory."""
        return self._with([turn.pin_memory() for turn in self.turns])

    def _with(self, turns: list[Turn]) -> Share:
        return Share(turns, self.samples, self.pieces, self.epoch, self.step, self.everyone, self.cut)
