"""Random shifts and flips of a whole batch at once, on its device.

A sample's augmentation is a function of the image and of random numbers, which are hashes of (seed, epoch, sample id)
from the host. So it does not depend on the batch, the piece, the process or a resume.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lockstep.arithmetic.order import hash64

NUMBERS_PER_SAMPLE = 3  # random numbers per sample: vertical shift, horizontal shift, flip


@dataclass(frozen=True)
class Augment:
    """Random shifts and flips of training images.

    Attributes:
        crop: largest shift in pixels, in each direction; 0: none. It equals padding by `crop` and a random crop.
        flip: whether to mirror half of the images left to right.
        fill: fill of the uncovered border: `zero` (black) or `reflect`.
    """

    crop: int = 0
    flip: bool = False
    fill: str = "zero"

    def __bool__(self) -> bool:
        return self.crop > 0 or self.flip

    def random_numbers(self, seed: int, epoch: int | NDArray[np.int64], ids: NDArray[np.int64]) -> Tensor | None:
        """Return the random numbers of samples.

        Args:
            seed: the run's seed.
            epoch: one epoch for all samples, or a key for each, [n], see `MicroBatch.epoch_keys`.
            ids: the samples' ids, [n].

        Returns:
            Numbers in [0, 1), float32 [n, NUMBERS_PER_SAMPLE] on the host; None if nothing is augmented.
        """
        if not self:
            return None
        hashes = hash64(seed, 0xA06, np.reshape(epoch, (-1, 1)), ids[:, None], np.arange(NUMBERS_PER_SAMPLE))
        # the upper 24 bits, which float32 holds; it could round a longer number up to 1.0
        return torch.from_numpy(((hashes >> 40) * 2.0**-24).astype(np.float32))

    def __call__(self, images: Tensor, random_numbers: Tensor, outside: int = 0) -> Tensor:
        """Return augmented images, with one gather.

        Args:
            images: [n, C, H, W] of any dtype; uint8 is the fastest.
            random_numbers: what the method `random_numbers` returned, float32 [n, NUMBERS_PER_SAMPLE].
            outside: value of the uncovered border with `fill=zero`.
        """
        n, channels, height, width = images.shape
        size = height * width
        rows = torch.arange(height, device=images.device).expand(n, height)
        columns = torch.arange(width, device=images.device).expand(n, width)
        if self.flip:
            columns = torch.where(random_numbers[:, 2:] < 0.5, columns.flip(1), columns)
        if self.crop:
            shifts = (random_numbers[:, :2] * (2 * self.crop + 1)).long() - self.crop
            rows, columns = rows + shifts[:, :1], columns + shifts[:, 1:]
            if self.fill == "zero":
                images = F.pad(images, (self.crop,) * 4, value=outside)
                rows, columns = rows + self.crop, columns + self.crop
            else:
                rows, columns = _mirrored(rows, height), _mirrored(columns, width)
        at = rows[:, :, None] * images.shape[3] + columns[:, None, :]
        at = at.view(n, 1, size).expand(n, channels, size)
        return images.reshape(n, channels, -1).gather(2, at).view(n, channels, height, width)


def _mirrored(positions: Tensor, size: int) -> Tensor:
    """Reflect positions beyond an edge at the edge, without repeating the edge itself."""
    return (size - 1) - ((size - 1) - positions.abs()).abs()
