"""Random shifts and flips of a whole batch at once, on its device.

A sample's augmentation is a function of the image and of uniform numbers that are hashes of (seed, epoch, sample id),
made on the host. So it is the same in whichever batch, piece or process the sample lies, and after a resume.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lockstep.arithmetic.order import hash64, uniform

DRAWS = 3  # per sample: vertical shift, horizontal shift, flip


@dataclass(frozen=True)
class Augment:
    """What is done to training images.

    Attributes:
        crop: largest shift in pixels, each way; 0 for none. (Pad by `crop`, then crop at random, is the same thing.)
        flip: mirror left and right, half of the time.
        fill: what a shift uncovers: `zero` (black) or `reflect`.
    """

    crop: int = 0
    flip: bool = False
    fill: str = "zero"

    def __bool__(self) -> bool:
        return self.crop > 0 or self.flip

    def draws(self, seed: int, epoch: int | NDArray[np.int64], ids: NDArray[np.int64]) -> Tensor | None:
        """Uniforms in [0, 1) for the samples `ids`, float32 [n, DRAWS] on the host; None where nothing is augmented.
        The epoch is one for all, or each sample's own."""
        if not self:
            return None
        numbers = uniform(hash64(seed, 0xA06, np.reshape(epoch, (-1, 1)), ids[:, None], np.arange(DRAWS)))
        return torch.from_numpy((np.floor(numbers * 2**24) * 2**-24).astype(np.float32))  # rounding could give 1.0

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Augmented images, `[n, C, H, W]` of any dtype, by one gather. Cheapest on uint8."""
        n, channels, height, width = images.shape
        size = height * width
        rows = torch.arange(height, device=images.device).expand(n, height)
        columns = torch.arange(width, device=images.device).expand(n, width)
        if self.flip:
            columns = torch.where(draws[:, 2:] < 0.5, columns.flip(1), columns)
        if self.crop:
            shifts = (draws[:, :2] * (2 * self.crop + 1)).long() - self.crop
            rows, columns = rows + shifts[:, :1], columns + shifts[:, 1:]
            if self.fill == "zero":
                images = F.pad(images, (self.crop,) * 4)
                rows, columns = rows + self.crop, columns + self.crop
            else:
                rows, columns = _mirrored(rows, height), _mirrored(columns, width)
        at = rows[:, :, None] * images.shape[3] + columns[:, None, :]
        at = at.view(n, 1, size).expand(n, channels, size)
        return images.reshape(n, channels, -1).gather(2, at).view(n, channels, height, width)


def _mirrored(positions: Tensor, size: int) -> Tensor:
    """Positions beyond an edge, reflected at it (the edge itself is not repeated)."""
    return (size - 1) - ((size - 1) - positions.abs()).abs()
