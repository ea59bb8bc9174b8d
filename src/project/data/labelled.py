"""Image files as a data set: labelled, with a split into training, validation and test; or to be predicted."""

from __future__ import annotations

import csv
import hashlib
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lockstep.arithmetic.layout import Refusal, counted
from lockstep.loading.datasets import Spec
from project.data.image_folder import DEEP, EXTENSIONS, MODES, UNREADABLE, decode, images_in, too_deep

# ImageNet's, the usual choice for photographs; grey: the mean over its channels
MOMENTS = {1: ((0.449,), (0.226,)), 3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
PARTS = ("train", "val", "test")  # as folders and columns call them
CHECKED_FILES, CHECK_SECONDS = 20_000, 10.0


class LabelledFiles:
    """Images that are decoded when they are asked for: the short side becomes `image_size`, the middle is kept.
    Transforms get them whole.

    Args:
        root: what the names are relative to.
        names: of the files.
        labels: whole numbers, one for each file.
        image_size: pixels.
        channels: 1 or 3.
    """

    streams = True
    draws = False

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        labels: Sequence[int] | NDArray[np.int64],
        image_size: int,
        channels: int,
    ) -> None:
        self.root = root
        # Arrays, not lists: counting references to a million strings would copy their memory into every worker.
        self.names: NDArray[np.str_] = np.asarray(names, dtype=np.str_)
        self.labels = np.asarray(labels, dtype=np.int64)
        self.image_size = image_size
        self.channels = channels

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.decoded(index, self.image_size)

    def whole(self, index: int) -> tuple[Tensor, int]:
        return self.decoded(index, None)

    def decoded(self, index: int, image_size: int | None) -> tuple[Tensor, int]:
        return decode(self.path(index), image_size, MODES[self.channels]), int(self.labels[index])

    def path(self, index: int) -> Path:
        return self.root / str(self.names[index])

    def part(self, ids: NDArray[np.int64]) -> LabelledFiles:
        return LabelledFiles(self.root, self.names[ids].tolist(), self.labels[ids], self.image_size, self.channels)

    def fingerprint(self) -> str:
        """Over names, sizes and labels: reading every byte would take too long."""
        digest = hashlib.sha256(self.labels.tobytes())
        for index in range(len(self)):
            digest.update(f"{self.names[index]}\0{self.path(index).stat().st_size}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()


def image_spec(
    image_size: int, channels: int, mean: Sequence[float] | None, std: Sequence[float] | None, classes: Sequence[str]
) -> Spec:
    """What the images are, from the options of an opener.

    Raises:
        ValueError: an option out of range.
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
    return Spec(channels, image_size, tuple(classes), tuple(mean), tuple(std))


def split(files: LabelledFiles, val_fraction: float, test_fraction: float, seed: int) -> list[LabelledFiles | None]:
    """Training, validation and test: of each class the shares whose names' hash with `seed` is smallest, one file at
    least of three. So a file that is added later moves hardly another. A part whose fraction is 0 is None.

    Raises:
        ValueError: a fraction out of range.
    """
    if type(test_fraction) not in (int, float) or not 0 <= test_fraction < 1 - val_fraction:
        raise ValueError(f"test_fraction={test_fraction}: must be at least 0, and with val_fraction below 1")
    keyed = (hashlib.sha256(f"{seed} {name}".encode(errors="surrogateescape")).digest() for name in files.names)
    by_hash = np.argsort(np.array([int.from_bytes(key[:8]) for key in keyed], dtype=np.uint64), kind="stable")
    part_of = np.zeros(len(files), dtype=np.int64)
    for label in np.unique(files.labels):
        members = by_hash[files.labels[by_hash] == label]
        start = 0
        for part, fraction in ((1, val_fraction), (2, test_fraction)):
            least = fraction > 0 and len(members) >= 3
            stop = min(start + max(round(fraction * len(members)), int(least)), len(members) - 1)
            part_of[members[start:stop]] = part
            start = stop
    parts = [files.part(np.flatnonzero(part_of == part)) for part in range(3)]
    return [part if len(part) else None for part in parts]


def check_headers(parts: Sequence[LabelledFiles]) -> None:
    """Opens images spread over all parts, as many as time allows: a broken file should not end a run after an hour.

    Raises:
        Refusal: naming the first that can't be read.
    """
    stop = time.monotonic() + CHECK_SECONDS
    stride = max(1, sum(map(len, parts)) // CHECKED_FILES)
    for path in (part.path(index) for part in parts for index in range(0, len(part), stride)):
        try:
            with Image.open(path) as image:
                deep = too_deep(image)
        except UNREADABLE:
            raise Refusal(f"{path} can't be read as an image: repair or remove it") from None
        if deep:
            raise Refusal(f"{path} has {DEEP}")
        if time.monotonic() > stop:
            break


class ImageFiles(LabelledFiles):
    """Images without labels, those of a folder in sorted order; an item is `(image, its number)`.

    One that can't be decoded is black, and its number is -1: it is told by its absence in what comes back.

    Args:
        images: a folder, with images at any depth; a file; a list of paths, .txt (one a line) or .csv (in the column
            `file` or `path`, else the first); or several of these.
        image_size: pixels.
        channels: 1 or 3.

    Raises:
        Refusal: something is not there, no image is in it, none can be decoded; or another number of channels.
    """

    draws = False

    def __init__(self, images: str | Path | Sequence[str], image_size: int, channels: int) -> None:
        if channels not in MODES:
            raise Refusal(f"images={images}: image files have 1 or 3 channels, the model was trained on {channels}")
        given = [images] if isinstance(images, str | Path) else images
        parts = [Path(str(each)).expanduser() for each in given]
        alone = len(parts) == 1 and parts[0].is_dir()  # its files are called as they are in there
        names = images_in(parts[0], ".") if alone else [*chain(*map(_paths, parts))]
        if not names:
            raise Refusal(f"images={images}: no image in it; known: {', '.join(EXTENSIONS)}")
        super().__init__(parts[0] if alone else Path(), names, range(len(names)), image_size, channels)
        if all(self[index][1] < 0 for index in range(len(self))):  # asks up to the first that can be
            raise Refusal(f"images={images}: {names[0]} can't be decoded, and no other")

    def decoded(self, index: int, image_size: int | None) -> tuple[Tensor, int]:
        try:
            return super().decoded(index, image_size)
        except Refusal:
            return torch.zeros(self.channels, self.image_size, self.image_size, dtype=torch.uint8), -1


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
        where = "relative to its folder, of a .csv in the column file or path, else the first"
        raise Refusal(f"images={given}: there is no {absent[0]}; a list's paths are {where}")
    return list(map(str, paths))
