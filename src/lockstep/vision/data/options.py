"""The options that all functions share which open labelled images: how images are read, described and divided."""

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.splits import Sizes, Source, Spec
from lockstep.text import plural
from lockstep.vision.data.labelled import MODES, UNREADABLE, LabelledFiles
from lockstep.vision.data.pixels import Reading, open_image

# ImageNet's mean and std by channels, the usual choice for photographs. For grey images: the means over RGB.
MOMENTS = {1: ((0.449,), (0.226,)), 3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
PHOTOGRAPH = 224  # pixels: the size of photographs, ImageNet's usual one, if the user gives none
SAMPLED_SIZES = 64  # files whose sizes are read for it
SPLIT_RULE = 2  # of `split_ids`: with another number, splits that were stored by an older rule are made again


@dataclass(frozen=True)
class ImageOptions:
    """The options of every function that opens labelled images. The pages of conf/data describe them.

    `known_classes` comes from a checkpoint, see `classes.ordered`.

    Raises:
        ValueError: An option is out of range.
    """

    image_size: int | None = None
    channels: int = 3
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    val_fraction: float = 0.1
    test_fraction: float = 0.1
    split_seed: int = 0
    background: str | Sequence[int] = "white"
    bits: int | None = None
    known_classes: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.spec(()), self.reading  # refuse bad options first

    @property
    def reading(self) -> Reading:
        """How the pixels of files are read."""
        return Reading(self.background, self.bits)

    def spec(self, classes: Sequence[str], task: str = "classification") -> Spec:
        """Return the description of the images; its size is PHOTOGRAPH while it is unknown."""
        size = PHOTOGRAPH if self.image_size is None else self.image_size
        if type(size) is not int or size < 1:
            raise ValueError(f"image_size={size}: must be a whole number of at least 1")
        if type(self.channels) is not int or self.channels not in MODES:
            raise ValueError(f"channels={self.channels}: must be 1 (grey) or 3 (RGB)")
        pairs = zip((self.mean, self.std), MOMENTS[self.channels], strict=True)
        mean, std = (usual if moment is None else moment for moment, usual in pairs)
        for name, values in {"mean": mean, "std": std}.items():
            if not isinstance(values, Sequence) or len(values) != self.channels:
                raise ValueError(f"{name}={values}: must be {plural(self.channels, 'number')}, one per channel")
        if min(mean) < 0:
            raise ValueError(f"mean={mean}: must be at least 0")
        if min(std) <= 0:
            raise ValueError(f"std={std}: must be greater than 0")
        return Spec(self.channels, size, tuple(classes), tuple(mean), tuple(std), task)

    def with_size(self, parts: Sequence[LabelledFiles]) -> tuple["ImageOptions", Sizes]:
        """Read the sizes of some files of the first part. Choose the images' size by them if the user gives none.

        It is the files' usual short side, and PHOTOGRAPH at most. All parts get it.

        Returns:
            The options with the size, and width and height of the files that were looked at.
        """
        sizes = []
        for index in parts[0].sample(SAMPLED_SIZES):
            with contextlib.suppress(*UNREADABLE), open_image(parts[0].encoded(int(index))) as image:
                sizes.append(image.size)
        image_size = self.image_size
        if image_size is None:
            image_size = min(PHOTOGRAPH, int(np.median([min(size) for size in sizes]))) if sizes else PHOTOGRAPH
        for part in parts:
            part.image_size = image_size
        return replace(self, image_size=image_size), tuple(sizes)

    def split(self, files: LabelledFiles) -> list[LabelledFiles | None]:
        """Split files into training, validation and test, as `split_ids` does. An empty part is None."""
        parts = [files.part(ids) for ids in self.split_ids(files)]
        return [part if len(part) else None for part in parts]

    def split_ids(self, files: Any) -> list[NDArray[np.int64]]:
        """Return the numbers of the training, validation and test files.

        The files of each class are sorted by a hash of their names and the seed. If labels are not classes, all files
        are sorted together. The first files are for the test, the next ones for validation, the rest for training. So
        `val_fraction` does not change the test. A class of three or more files has at least one in each part whose
        fraction is not 0. If a file is added later, hardly any other file moves to another part.

        Raises:
            ValueError: A fraction is out of range.
        """
        val, test, seed = self.val_fraction, self.test_fraction, self.split_seed
        if type(test) not in (int, float) or not 0 <= test < 1 - val:
            raise ValueError(f"test_fraction={test}: must be at least 0, and together with val_fraction below 1")
        names = map(files.name, range(len(files)))
        keys = (hashlib.sha256(f"{seed} {name}".encode(errors="surrogateescape")).digest() for name in names)
        by_hash = np.argsort(np.array([int.from_bytes(key[:8]) for key in keys], dtype=np.uint64), kind="stable")
        part_of = np.zeros(len(files), dtype=np.int64)  # of each file: 0 for training, 1 for validation, 2 for the test
        classes = files.labels if files.labels.ndim == 1 else np.zeros(len(files), dtype=np.int64)
        for label in np.unique(classes):
            members = by_hash[classes[by_hash] == label]
            minimum = 1 if len(members) >= 3 else 0
            start = 0
            # `reserved`: number of files that must remain, `minimum` for validation and 1 for training.
            for part, fraction, reserved in ((2, test, minimum + 1), (1, val, 1)):
                size = max(round(fraction * len(members)), minimum if fraction > 0 else 0)
                stop = min(start + size, len(members) - reserved)
                part_of[members[start:stop]] = part
                start = stop
        return [np.flatnonzero(part_of == part) for part in range(3)]

    @property
    def split_text(self) -> str:
        """The options that decided the parts of `split_ids`, for a message. With folds, `val_fraction` is 0."""
        return f"split by {'data.val_fraction, ' if self.val_fraction else ''}data.test_fraction and data.split_seed"


def with_image_options(opener: Callable[..., Source]) -> Callable[..., Source]:
    """Let a function that opens a data set take each of the `ImageOptions` by its name, in place of `options`."""
    shared = inspect.signature(ImageOptions).parameters

    @wraps(opener)
    def with_names(*args: Any, **named: Any) -> Source:
        options = ImageOptions(**{name: named.pop(name) for name in shared if name in named})
        return opener(*args, options=options, **named)

    parameters = [each for each in inspect.signature(opener).parameters.values() if each.name != "options"]
    parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in shared.values()]
    with_names.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_names.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_names
