"""Decode labelled image files, and check them."""

import contextlib
import hashlib
import io
import os
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Subset

from lockstep.errors import UserError
from lockstep.launch.machine import available_cores
from lockstep.text import join_names, plural
from lockstep.vision.data.pixels import (
    AS_USUAL,
    TOO_DEEP,
    Reading,
    composed,
    fewer_bits_text,
    highest_value,
    largest_value,
    of_8_bits,
    open_image,
    too_deep,
    too_large_text,
)

MODES = {1: "L", 3: "RGB"}  # Pillow's modes, by channels
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # errors of opening a damaged file
UNDECODABLE = (*UNREADABLE, struct.error)  # errors of decoding it
PARTS = ("train", "val", "test")  # names of folders, and the values of the column `split` in a table of labels
CHECKED_FILES, CHECK_SECONDS = 20_000, 10.0  # the most files that `check_headers` opens, roughly, and its time limit
CHECKED_DEEP_FILES = 32  # the most files of 16 bits that it decodes
SKIP = "data.skip_broken=true to leave such files out"  # for messages


@dataclass(eq=False)
class LabelledFiles:
    """A data set of image files that are decoded when they are read.

    The short side is resized to `image_size`, and the middle is cut out. If the run has transforms, Lockstep reads
    samples by `whole`, which neither resizes nor cuts.
    """

    root: Path  # the folder that names are relative to
    # An array, not a list: forked workers share memory until one writes to it, and Python writes a reference count into
    # each string of a list when it is read.
    names: NDArray[np.str_]
    labels: NDArray[Any]  # classes, int64 [n]; or several numbers of each image, float32 [n, k]
    image_size: int  # pixels; it can be unknown until `ImageOptions.with_size`
    channels: int  # 1 or 3
    reading: Reading = field(default=AS_USUAL, kw_only=True)

    wants_workers = True  # Lockstep then fetches samples in loader processes
    uses_random_numbers = False  # Lockstep then does not seed the random generators before each sample
    skip_hint = f", or {SKIP}"  # the end of a message on an image that can't be decoded

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return self.decoded(index, self.image_size)

    def whole(self, index: int) -> tuple[Tensor, Any]:
        """Return a sample whose image is neither resized nor cut."""
        return self.decoded(index, None)

    def decoded(self, index: int, image_size: int | None) -> tuple[Tensor, Any]:
        """Return a sample; see `decode` for `image_size`.

        Raises:
            UserError: The image can't be decoded.
        """
        label = int(self.labels[index]) if self.labels.ndim == 1 else torch.from_numpy(self.labels[index])
        try:
            image = decode(self.encoded(index), image_size, MODES[self.channels], self.reading)
        except Image.DecompressionBombError as error:
            reason = f"is {too_large_text(error)}: make it smaller{self.skip_hint}"
            raise UserError(f"{self.location(index)} {reason}") from error
        except UNDECODABLE as error:
            reason = f"can't be decoded ({error}): repair or remove it{self.skip_hint}"
            raise UserError(f"{self.location(index)} {reason}") from error
        return image, label

    def encoded(self, index: int) -> Path | io.BytesIO:
        """Return the image's file, or its bytes, for Pillow to open."""
        return self.path(index)

    def location(self, index: int) -> str:
        """Return where an image lies, for messages."""
        return str(self.path(index))

    def name(self, index: int) -> str:
        return str(self.names[index])

    def path(self, index: int) -> Path:
        return self.root / self.name(index)

    def sample(self, most: int) -> NDArray[np.int64]:
        """Return the numbers of some evenly spaced images, `most` at most."""
        return np.unique(np.linspace(0, len(self) - 1, most).astype(np.int64))

    def part(self, ids: NDArray[np.int64]) -> "LabelledFiles":
        """Return the samples with these numbers."""
        return replace(self, names=self.names[ids], labels=self.labels[ids])

    def fingerprint(self) -> str:
        """Return a hash over names, file sizes and labels. Reading all bytes would take too long."""
        sizes = (self.path(index).stat().st_size for index in range(len(self)))
        return fingerprint_of(self.labels, map(str, self.names), sizes)


def fingerprint_of(labels: NDArray[Any], names: Iterable[str], sizes: Iterable[int]) -> str:
    """Return a hash over the labels, names and sizes of images."""
    digest = hashlib.sha256(labels.tobytes())
    for name, size in zip(names, sizes, strict=True):
        digest.update(f"{name}\0{size}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def decode(source: Path | io.BytesIO, image_size: int | None, mode: str, reading: Reading = AS_USUAL) -> Tensor:
    """Decode an image to uint8 [channels, image_size, image_size].

    The image is turned upright by its EXIF data, its short side is resized, and the middle is cut out. If the file has
    several images, the first is used.

    Args:
        source: a file, or its bytes.
        image_size: pixels; None: the size is not changed, [channels, height, width].
        mode: Pillow's mode, `L` or `RGB`.
        reading: how pixels of 16 bits and transparent ones are read.

    Raises:
        OSError: The image can't be decoded. Some damage raises another error of `UNDECODABLE`.
        ValueError: The image has 32 bits per channel, or more bits than `reading` has.
    """
    with open_image(source) as image:
        if too_deep(image):
            raise ValueError(TOO_DEEP)
        largest = largest_value(image, reading.bits)
        ImageOps.exif_transpose(image, in_place=True)
        fitted = composed(of_8_bits(image, largest), reading.background).convert(mode)
        if image_size is not None and fitted.size != (image_size, image_size):
            fitted = ImageOps.fit(fitted, (image_size, image_size), Image.Resampling.BILINEAR)
    pixels = np.array(fitted).reshape(fitted.height, fitted.width, -1)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def subsets(files: Any, ids: Sequence[NDArray[np.int64]]) -> list[Any]:
    """Return the parts of a data set, from the numbers of the samples of each; an empty part is None."""
    return [Subset(files, part) if len(part) else None for part in ids]  # type: ignore[arg-type]


def unique_images(
    paths: Sequence[str | Path], targets: Sequence[Any], parts: Sequence[str], location: Callable[[int], str]
) -> tuple[NDArray[np.int64], str]:
    """Find the files that are listed again: by another path, or by a link.

    Args:
        paths: the files.
        targets: what each has as its target.
        parts: the part of each.
        location: returns where a file is listed, for messages.

    Returns:
        The numbers of the files, each image once, and a text that counts the others; empty if there are none.

    Raises:
        UserError: An image is in two parts, or has two targets.
    """
    first: dict[tuple[int, int, int, int], int] = {}
    ids: list[int] = []
    again: list[int] = []
    for number, path in enumerate(paths):
        stat = os.stat(path)
        # The size and the time are in it because some network drives have no inodes that differ.
        before = first.setdefault((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns), number)
        (ids if before == number else again).append(number)
        both = f"{location(before)} and {location(number)} are the same image"
        if parts[before] != parts[number]:
            raise UserError(f"{both}, in {parts[before]} and in {parts[number]}: it must be in one part")
        if targets[before] != targets[number]:
            raise UserError(f"{both}, with {targets[before]} and with {targets[number]}: it must have one label")
    text = ""
    if again:
        where = join_names(map(location, again))
        text = f"{plural(len(again), 'image')} listed again, with the same label, counted once: {where}"
    return np.array(ids, dtype=np.int64), text


def check_headers(parts: Sequence[LabelledFiles]) -> None:
    """Open evenly spaced images of all parts in turn, so that broken files are found before training.

    After CHECK_SECONDS it stops, so in large parts the last images may stay unchecked.

    Raises:
        UserError: Some images can't be read. The message counts them and names the first ones. Or none of the images of
            16 bits uses more than 14.
    """
    stop = time.monotonic() + CHECK_SECONDS
    stride = max(1, sum(map(len, parts)) // CHECKED_FILES)
    checked, broken, large, deep = 0, [], [], []
    images_by_part = ([(part, index) for index in range(0, len(part), stride)] for part in parts)
    for files, index in filter(None, chain.from_iterable(zip_longest(*images_by_part))):
        checked += 1
        try:
            with open_image(files.encoded(index)) as image:
                if too_deep(image):
                    broken.append(f"{files.location(index)} ({TOO_DEEP})")
                elif largest_value(image) is not None:
                    deep.append((files, index))
        except Image.DecompressionBombError as error:
            large.append(f"{files.location(index)} ({too_large_text(error)})")
        except UNREADABLE as error:
            reason = getattr(error, "strerror", None)  # of the file system
            broken.append(f"{files.location(index)}{(reason and f' ({reason})') or ''}")
        if time.monotonic() > stop:
            break
    for names, fault, remedy in (
        (broken, "can't be read", "repair or remove {}"),
        (large, "can't be read, being too large", "make {} smaller"),
    ):
        if names:
            which = f"{len(names):,} of {checked:,} image files that were checked {fault}: {join_names(names, 5)}"
            it = "it" if len(names) == 1 else "them"
            raise UserError(f"{which}: {remedy.format(it)}{parts[0].skip_hint}")
    _check_bits(deep)


def check_bits(parts: Sequence[LabelledFiles], most: int = 200) -> None:
    """Open some evenly spaced images; see `_check_bits`. `check_headers` does this as well."""
    deep = []
    for part in parts:
        for index in range(0, len(part), max(1, sum(map(len, parts)) // most)):
            with contextlib.suppress(*UNDECODABLE), open_image(part.encoded(index)) as image:
                if largest_value(image) is not None:
                    deep.append((part, index))
    _check_bits(deep)


def _check_bits(deep: Sequence[tuple[LabelledFiles, int]]) -> None:
    """Decode evenly spaced images of 16 bits. Refuse them if none uses more than 14, unless `data.bits` is given."""
    highest: list[int] = []
    for files, index in deep[:: max(1, len(deep) // CHECKED_DEEP_FILES)]:
        if files.reading.bits is not None:
            return
        with contextlib.suppress(*UNDECODABLE), open_image(files.encoded(index)) as image:
            value = highest_value(image)
            highest += [] if value is None else [value]
        if highest and not fewer_bits_text(highest):
            return
    if highest:
        files, index = deep[0]
        raise UserError(f"{files.location(index)}: {fewer_bits_text(highest)}")


def decodable(parts: Sequence[LabelledFiles]) -> tuple[list[NDArray[np.int64]], str]:
    """Decode all images of all parts, on all cores.

    Returns:
        For each part the numbers of the images that can be decoded, and a text that counts the others.
    """
    images = [(part, index) for part in parts for index in range(len(part))]
    with ThreadPoolExecutor(available_cores()) as pool:
        faults = [*pool.map(_fault, images)]
    of_images = zip(images, faults, strict=True)
    broken = [f"{part.location(index)}{fault}" for (part, index), fault in of_images if fault is not None]
    text = f"all {plural(len(images), 'file')} can be decoded"
    if broken:
        text = f"{plural(len(broken), 'file')} that can't be decoded left out: {join_names(broken, 5)}"
    is_good = np.array([fault is None for fault in faults], dtype=bool)
    borders = np.cumsum([len(part) for part in parts])[:-1]
    return [np.flatnonzero(part) for part in np.split(is_good, borders)], text


def _fault(image: tuple[LabelledFiles, int]) -> str | None:
    """Return why an image can't be decoded, where that is of use: ` (too large, ...)`; None if it can be decoded."""
    files, index = image
    try:
        decode(files.encoded(index), None, MODES[files.channels], files.reading)
    except Image.DecompressionBombError as error:
        return f" ({too_large_text(error)})"
    except UNDECODABLE:
        return ""
    return None
