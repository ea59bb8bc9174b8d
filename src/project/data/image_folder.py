"""The user's own image files: found, decoded, and without labels a data set."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from itertools import chain
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
    """Images without labels, those of a folder in sorted order; an item is `(image, its number)`.

    One that can't be decoded is black, and its number is -1: it is told by its absence in what comes back.

    Args:
        images: a folder, with images at any depth; a file; a list of paths, .txt (one a line) or .csv (in the column
            `file` or `path`, else the first); or several of these.
        image_size: pixels.
        channels: 1 or 3.

    Raises:
        Refusal: something is not there, no image is in it, or another number of channels.
    """

    streams = True
    draws = False

    def __init__(self, images: str | Path | Sequence[str], image_size: int, channels: int) -> None:
        if channels not in MODES:
            raise Refusal(f"images={images}: image files have 1 or 3 channels, the model was trained on {channels}")
        given = [images] if isinstance(images, str | Path) else images
        parts = [Path(str(each)).expanduser() for each in given]
        alone = len(parts) == 1 and parts[0].is_dir()  # its files are called as they are in there
        self.root, self.image_size, self.mode = parts[0] if alone else Path(), image_size, MODES[channels]
        self.names: NDArray[np.str_] = np.array(images_in(parts[0], ".") if alone else [*chain(*map(_paths, parts))])
        if not len(self.names):
            raise Refusal(f"images={images}: no image in it; known: {', '.join(EXTENSIONS)}")

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


def _paths(given: Path) -> list[str]:
    """The image files that a path stands for; those of a list are relative to its folder."""
    if given.is_dir():
        return [str(given / name) for name in images_in(given, ".")]
    if not given.is_file():
        raise Refusal(f"images={given}: no such file or folder")
    kind = given.suffix.lower()
    if kind not in (".txt", ".csv"):
        return [str(given)]
    lines = given.read_text("utf-8-sig", errors="surrogateescape").splitlines()
    rows = [[line.strip()] for line in lines] if kind == ".txt" else list(csv.reader(lines))
    head = rows[0] if rows else []
    named = next((head.index(name) for name in ("file", "path") if name in head), None)
    paths = [given.parent / row[named or 0] for row in rows[named is not None :] if row and row[named or 0]]
    if absent := [path for path in paths if not path.is_file()]:
        raise Refusal(f"images={given}: there is no {absent[0]}")
    return list(map(str, paths))


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
