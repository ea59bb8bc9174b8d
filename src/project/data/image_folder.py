"""The user's own image files: found and decoded."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from lockstep.arithmetic.layout import Refusal

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
MODES = {1: "L", 3: "RGB"}
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
DEEP = "32-bit pixels: save it with 8"


def decode(path: Path, image_size: int | None, mode: str) -> Tensor:
    """An image file as uint8 [channels, image_size, image_size]: upright, as its EXIF data say, the short side resized,
    the middle kept; of several pictures the first.

    Args:
        image_size: None: as it is stored.
        mode: Pillow's, `L` or `RGB`.

    Raises:
        Refusal: it can't be decoded, or has 32-bit pixels.
    """
    try:
        with Image.open(path) as image:
            ImageOps.exif_transpose(image, in_place=True)
            fitted = _of_8_bits(image).convert(mode)
            if image_size is not None and fitted.size != (image_size, image_size):
                fitted = ImageOps.fit(fitted, (image_size, image_size), Image.Resampling.BILINEAR)
    except (*UNREADABLE, struct.error) as error:
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
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        # sorted: of two links to a folder, the same one is followed on every machine
        images = (file for file in files if file.lower().endswith(EXTENSIONS) and not file.startswith("."))
        found += [os.path.relpath(os.path.join(folder, file), root) for file in images]
    return sorted(found)
