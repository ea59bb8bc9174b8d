"""The user's own image files: found, decoded, and without labels a data set."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from lockstep.arithmetic.layout import Refusal

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # torchvision's
MODES = {1: "L", 3: "RGB"}
DEEP = "32-bit pixels: save it with 8"


class ImageFiles:
    """Images without labels, in sorted order; an item is `(image, its number)`.

    One that can't be decoded is black, and its number is -1: it is told by its absence in what comes back.

    Args:
        root: holds images, at any depth.
        image_size: pixels.
        channels: 1 or 3.

    Raises:
        Refusal: no such folder, no image in it, or another number of channels.
    """

    streams = True
    draws = False

    def __init__(self, root: Path, image_size: int, channels: int) -> None:
        if channels not in MODES:
            raise Refusal(f"images={root}: image files have 1 or 3 channels, the model was trained on {channels}")
        if not root.is_dir():
            raise Refusal(f"images={root}: no such folder")
        self.root, self.image_size, self.mode = root, image_size, MODES[channels]
        self.names: NDArray[np.str_] = np.array(images_in(root, "."))
        if not len(self.names):
            raise Refusal(f"images={root}: no image in it; known: {', '.join(EXTENSIONS)}")

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._decoded(index, self.image_size)

    def whole(self, index: int) -> tuple[Tensor, int]:
        """The image as it is stored, for transforms."""
        return self._decoded(index, None)

    def _decoded(self, index: int, image_size: int | None) -> tuple[Tensor, int]:
        try:
            return decode(self.root / str(self.names[index]), image_size, self.mode), int(index)
        except Refusal:
            side = self.image_size
            return torch.zeros(3 if self.mode == "RGB" else 1, side, side, dtype=torch.uint8), -1


def decode(path: Path, image_size: int | None, mode: str) -> Tensor:
    """An image file as uint8 [channels, image_size, image_size]; the short side is resized, the middle kept.

    Args:
        image_size: None: as it is stored.
        mode: Pillow's, `L` or `RGB`.

    Raises:
        Refusal: it can't be decoded, or has 32-bit pixels.
    """
    try:
        with Image.open(path) as image:
            fitted = _of_8_bits(image).convert(mode)
            if image_size is not None and fitted.size != (image_size, image_size):
                fitted = ImageOps.fit(fitted, (image_size, image_size), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise Refusal(f"{path} can't be decoded ({error})") from error
    pixels = np.array(fitted).reshape(fitted.height, fitted.width, -1)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _of_8_bits(image: Image.Image) -> Image.Image:
    """A grey image with what 16 bits hold scaled to 8; Pillow would make all above 255 white."""
    if too_deep(image):
        raise ValueError(DEEP)
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray(((np.asarray(image).astype(np.int64) + 128) // 257).astype(np.uint8))


def too_deep(image: Image.Image) -> bool:
    """Whether nobody knows which numbers are black and white: not where PNG and PPM, which have no more than 16 bits,
    are read as 32."""
    return image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM"))


def images_in(root: Path, name: str) -> list[str]:
    """Paths of a class's images, relative to `root`, in sorted order. A folder that links lead to again counts once."""
    found, seen = [], set()
    for folder, folders, files in os.walk(root / name, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()  # of two links to a folder, the same one is followed on every machine
        images = (file for file in files if file.lower().endswith(EXTENSIONS))
        found += [os.path.relpath(os.path.join(folder, file), root) for file in images]
    return sorted(found)
