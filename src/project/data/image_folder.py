"""The user's own images: `train/`, `test/` and perhaps `val/`, each with a folder per class."""

from __future__ import annotations

import csv
import hashlib
import os
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from lockstep.arithmetic.layout import Refusal, counted
from lockstep.loading.datasets import Source, Spec

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # torchvision's
MODES = {1: "L", 3: "RGB"}
# ImageNet's, the usual choice for photographs; grey: the mean over its channels
MOMENTS = {1: ((0.449,), (0.226,)), 3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
WANTED = "hold train/ and test/, with a folder of images per class in each"
CHECKED_FILES, CHECK_SECONDS = 20_000, 10.0
DEEP = "32-bit pixels: save it with 8"


class FolderDataset:
    """Images that are decoded when they are asked for: the short side becomes `image_size`, the middle is kept.

    Args:
        root: holds a folder per class, images at any depth below.
        image_size: pixels.
        channels: 1 or 3.

    Raises:
        Refusal: no class folders, one without an image, or one whose name is not UTF-8.
    """

    streams = True
    draws = False

    def __init__(self, root: Path, image_size: int, channels: int) -> None:
        self.root = root
        self.image_size = image_size
        self.mode = MODES[channels]
        self.classes = tuple(sorted(e.name for e in os.scandir(root) if e.is_dir() and not e.name.startswith(".")))
        if not self.classes:
            raise Refusal(f"image_folder: {root} has no folders; one folder of images per class is expected there")
        for name in map(os.fsencode, self.classes):
            if name.decode(errors="replace").encode() != name:
                raise Refusal(f"image_folder: {root} has a folder whose name is not UTF-8, {name!r}: rename it")
        found = [_images(root, name) for name in self.classes]
        empty = [name for name, names in zip(self.classes, found, strict=True) if not names]
        if empty:
            raise Refusal(f"image_folder: no image in {root / empty[0]}; known: {', '.join(EXTENSIONS)}")
        # Arrays, not lists: counting references to a million strings would copy their memory into every worker.
        self.names: NDArray[np.str_] = np.array([name for names in found for name in names])
        self.labels = np.repeat(np.arange(len(found)), [len(names) for names in found])

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return decode(self.path(index), self.image_size, self.mode), int(self.labels[index])

    def path(self, index: int) -> Path:
        return self.root / str(self.names[index])

    def fingerprint(self) -> str:
        """Over names and sizes: reading every byte would take too long."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            digest.update(f"{self.names[index]}\0{self.path(index).stat().st_size}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()


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
        self.names: NDArray[np.str_] = np.array(_images(parts[0], ".") if alone else [*chain(*map(_paths, parts))])
        if not len(self.names):
            raise Refusal(f"images={images}: no image in it; known: {', '.join(EXTENSIONS)}")

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            return decode(self.root / str(self.names[index]), self.image_size, self.mode), int(index)
        except Refusal:
            side = self.image_size
            return torch.zeros(3 if self.mode == "RGB" else 1, side, side, dtype=torch.uint8), -1


def decode(path: Path, image_size: int, mode: str) -> Tensor:
    """An image file as uint8 [channels, image_size, image_size]; the short side is resized, the middle kept.

    Args:
        mode: Pillow's, `L` or `RGB`.

    Raises:
        Refusal: it can't be decoded, or has 32-bit pixels.
    """
    try:
        with Image.open(path) as image:
            fitted = _of_8_bits(image).convert(mode)
            if fitted.size != (image_size, image_size):
                fitted = ImageOps.fit(fitted, (image_size, image_size), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise Refusal(f"image_folder: {path} can't be decoded ({error})") from error
    pixels = np.array(fitted).reshape(image_size, image_size, -1)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _of_8_bits(image: Image.Image) -> Image.Image:
    """A grey image with what 16 bits hold scaled to 8; Pillow would make all above 255 white."""
    if _too_deep(image):
        raise ValueError(DEEP)
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray(((np.asarray(image).astype(np.int64) + 128) // 257).astype(np.uint8))


def _too_deep(image: Image.Image) -> bool:
    """Whether nobody knows which numbers are black and white: not where PNG and PPM, which have no more than 16 bits,
    are read as 32."""
    return image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM"))


def image_folder(
    data_dir: str,
    image_size: int = 32,
    channels: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Source:
    """Images under `<data_dir>/train/<class>/` and `<data_dir>/test/<class>/`, and `val/` where it exists.

    Args:
        image_size: pixels; images are resized and cropped to it.
        channels: 3 (RGB) or 1 (grey).
        mean: per channel, of pixels in 0..1; None: ImageNet's.
        std: likewise.

    Raises:
        Refusal: folders or images that are missing, differ in their classes, or can't be read.
    """
    if type(image_size) is not int or image_size < 1:
        raise ValueError(f"image_size={image_size}: must be a whole number of at least 1")
    if type(channels) is not int or channels not in MODES:
        raise ValueError(f"channels={channels}: must be 1 (grey) or 3 (RGB)")
    mean, std = (usual if given is None else given for given, usual in zip((mean, std), MOMENTS[channels], strict=True))
    for name, values in {"mean": mean, "std": std}.items():
        if not isinstance(values, Sequence) or len(values) != channels:
            raise ValueError(f"{name}={values}: must be {counted(channels, 'number')}, one per channel")
    if min(mean) < 0:
        raise ValueError(f"mean={mean}: must be at least 0")
    if min(std) <= 0:
        raise ValueError(f"std={std}: must be greater than 0")
    root = Path(data_dir)
    if not root.is_dir():
        raise Refusal(f"image_folder: data_dir={data_dir} is no folder; it should {WANTED}")
    absent = [name for name in ("train", "test") if not (root / name).is_dir()]
    if absent:
        raise Refusal(f"image_folder: there is no {root / absent[0]}; data_dir should {WANTED}")
    names = [name for name in ("train", "test", "val") if (root / name).is_dir()]
    parts = {name: FolderDataset(root / name, image_size, channels) for name in names}
    train = parts["train"]
    if len(train.classes) < 2:
        only = f"only one folder, {train.classes[0]}"
        raise Refusal(f"image_folder: {root / 'train'} has {only}; one per class is expected there, two at least")
    for name, part in parts.items():
        if differing := sorted(set(train.classes) ^ set(part.classes)):
            has = "train" if differing[0] in train.classes else name
            odd = f"only {has}/ has {differing[0]}"
            raise Refusal(f"image_folder: train/ and {name}/ in {root} must have the same classes; {odd}")
    check_headers(list(parts.values()))
    return Source(
        train, parts["test"], Spec(channels, image_size, train.classes, tuple(mean), tuple(std)), parts.get("val")
    )


def check_headers(parts: Sequence[FolderDataset]) -> None:
    """Opens images spread over all parts, as many as time allows: a broken file should not end a run after an hour.

    Raises:
        Refusal: naming the first that can't be read.
    """
    stop = time.monotonic() + CHECK_SECONDS
    stride = max(1, sum(map(len, parts)) // CHECKED_FILES)
    for path in (part.path(index) for part in parts for index in range(0, len(part), stride)):
        try:
            with Image.open(path) as image:
                too_deep = _too_deep(image)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            raise Refusal(f"image_folder: {path} can't be read as an image: repair or remove it") from None
        if too_deep:
            raise Refusal(f"image_folder: {path} has {DEEP}")
        if time.monotonic() > stop:
            break


def _paths(given: Path) -> list[str]:
    """The image files that a path stands for; those of a list are relative to its folder."""
    if given.is_dir():
        return [str(given / name) for name in _images(given, ".")]
    if not given.is_file():
        raise Refusal(f"images={given}: no such file or folder")
    if given.suffix not in (".txt", ".csv"):
        return [str(given)]
    lines = given.read_text(errors="surrogateescape").splitlines()
    rows = [[line.strip()] for line in lines] if given.suffix == ".txt" else list(csv.reader(lines))
    head = rows[0] if rows else []
    named = next((head.index(name) for name in ("file", "path") if name in head), None)
    paths = [given.parent / row[named or 0] for row in rows[named is not None :] if row and row[named or 0]]
    if absent := [path for path in paths if not path.is_file()]:
        raise Refusal(f"images={given}: there is no {absent[0]}")
    return list(map(str, paths))


def _images(root: Path, name: str) -> list[str]:
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
