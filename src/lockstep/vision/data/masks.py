"""Decode image files with a mask each, whose pixels are numbers of classes."""

import hashlib
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from lockstep.data.datasets import UNLABELLED
from lockstep.errors import UserError
from lockstep.vision.data.labelled import CHECK_SECONDS, UNREADABLE, LabelledFiles
from lockstep.vision.data.pixels import open_image, too_large_text, upright_size

MODES = ("1", "L", "P")  # Pillow's modes of one channel of 8 bits or less


@dataclass(eq=False)
class MaskedFiles(LabelledFiles):
    """Image files with a mask each, which is resized and cut as its image is.

    Items are `(image, mask)`, the mask uint8 [image_size, image_size].
    """

    masks: NDArray[np.str_]  # their paths, relative to `root`
    num_classes: int
    unlabelled: int | None  # the value of pixels that do not count

    uses_random_numbers = False

    def __post_init__(self) -> None:
        if self.unlabelled is not None and not self.num_classes <= self.unlabelled <= UNLABELLED:
            raise ValueError(
                f"unlabelled={self.unlabelled}: must be {self.num_classes} to {UNLABELLED}, no class's number"
            )

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, _ = super().__getitem__(index)
        return image, self.decoded_mask(index)

    def decoded_mask(self, index: int) -> Tensor:
        """Decode the mask of an image.

        Raises:
            UserError: It can't be decoded, has another size than its image, or a pixel is no number of a class.
        """
        path = self.root / str(self.masks[index])
        try:
            with open_image(path) as mask, open_image(self.path(index)) as image:
                if mask.mode not in MODES:
                    what = f"{path}: a mask of mode {mask.mode}"
                    raise UserError(f"{what}: must have one channel of 8 bits with numbers of classes, grey or palette")
                if mask.size != (size := upright_size(image)):
                    sizes = [" x ".join(map(str, each)) for each in (mask.size, size)]
                    raise UserError(f"{path}: a mask of {sizes[0]} pixels: must have {sizes[1]}, as {self.path(index)}")
                # Only positions are resampled: an image with its palette would be converted to colours.
                numbers = Image.fromarray(np.asarray(mask).astype(np.uint8))
        except Image.DecompressionBombError as error:
            raise UserError(f"{path} or its image is {too_large_text(error)}: make it smaller") from error
        except (*UNREADABLE, struct.error) as error:
            raise UserError(f"{path} can't be decoded ({error}): repair it") from error
        pixels = np.array(ImageOps.fit(numbers, (self.image_size, self.image_size), Image.Resampling.NEAREST))
        unlabelled = pixels == self.unlabelled
        if (pixels[~unlabelled] >= self.num_classes).any():
            worst, last = pixels[~unlabelled].max(), self.num_classes - 1
            right = f"must be 0 to {last}, the numbers of data.classes; data.unlabelled={worst} leaves such pixels out"
            raise UserError(f"{path}: a mask with pixels of {worst}: {right}")
        pixels[unlabelled] = UNLABELLED
        return torch.from_numpy(pixels)

    def check_masks(self) -> None:
        """Decode masks, as many as time allows, so that a wrong one does not end a run later; see `decoded_mask`."""
        stop = time.monotonic() + CHECK_SECONDS
        for index in range(len(self)):
            self.decoded_mask(index)
            if time.monotonic() > stop:
                return

    def part(self, ids: NDArray[np.int64]) -> "MaskedFiles":
        return replace(self, names=self.names[ids], labels=self.labels[ids], masks=self.masks[ids])

    def fingerprint(self) -> str:
        """Return a hash over names and file sizes of images and masks."""
        digest = hashlib.sha256(f"{super().fingerprint()} {self.unlabelled}".encode())
        for name in self.masks:
            digest.update(f"{name}\0{Path(self.root, str(name)).stat().st_size}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()
