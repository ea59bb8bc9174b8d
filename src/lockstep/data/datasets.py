"""What a data set is to the rest: splits, what their images are, and how a batch is fetched from them."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset, default_collate

from lockstep.arithmetic.layout import Layout
from lockstep.arithmetic.order import DataOrder, hash64
from lockstep.data.augment import Augment
from lockstep.errors import UserError

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Spec:
    """What a model must know of the images.

    Attributes:
        channels: 1 (grey) or 3 (RGB), usually.
        image_size: height and width in pixels.
        classes: names, in the order of the labels.
        mean: per channel, of pixels in 0..1; uint8 images are normalised with it on the device; float ones, which the
            data set has normalised itself, are shown by it.
        std: likewise.
    """

    channels: int
    image_size: int
    classes: tuple[str, ...]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        # a checkpoint holds them, and takes no numbers and texts of numpy's
        for name in ("channels", "image_size"):
            object.__setattr__(self, name, int(getattr(self, name)))
        for name, kind in (("classes", str), ("mean", float), ("std", float)):
            object.__setattr__(self, name, tuple(map(kind, getattr(self, name))))

    @property
    def num_classes(self) -> int:
        return len(self.classes)


@dataclass(frozen=True)
class Source:
    """What an opener (`_target_` in conf/data/) returns: map-style datasets of `(image, label)`.

    Images are uint8 `[C, H, W]`, normalised on the device; float ones are taken as they are. Without `val`, a part of
    `train` is held out; where `test` is None, nothing is tested. A `train` that augments its samples itself has a
    `val_candidates`: the same samples in the same order as evaluation shall see them, from which that part is taken.
    A run begins with what is said in `about`. `divided` says that the opener has cut all samples into train, val and
    test by itself: `evaluate.py` tests all of them where they are not those of the training.
    """

    train: Any
    test: Any
    spec: Spec
    val: Any = None
    val_candidates: Any = None
    about: str = ""
    divided: bool = False


@dataclass(frozen=True)
class Splits:
    """An opened data set, ready to be cut into steps.

    Attributes:
        train, val, test: map-style datasets; `val` is None where nothing is held out, `test` where nothing is tested.
        fingerprint: SHA-256 of the data (see `fingerprint`), in hex.
        balanced: whether an epoch has equally many samples of each class.
        mix: None, or what mixes the samples of a piece: from images and labels to images and labels [n, classes].
        about, divided: the source's.
    """

    train: Any
    val: Any
    test: Any
    spec: Spec
    fingerprint: str
    augment: Augment = field(default_factory=Augment)
    balanced: bool = False
    mix: Any = None
    about: str = ""
    divided: bool = False

    def order(self, layout: Layout, seed: int) -> DataOrder:
        """Which training samples make up each step; raises as `labels_of`, where they are balanced."""
        return DataOrder(len(self.train), layout, seed, labels_of(self.train) if self.balanced else None)

    @property
    def sizes(self) -> dict[str, int | None]:
        """The number of samples of train, val and test; None where there is no such split."""
        parts = {"train": self.train, "val": self.val, "test": self.test}
        return {name: None if part is None else len(part) for name, part in parts.items()}

    def class_counts(self) -> dict[str, int] | None:
        """The number of training samples of each class, by its name in the order of the labels. None where the data set
        can't tell its labels without making samples, or has labels that are no numbers of its classes."""
        try:
            labels = labels_of(self.train)
        except UserError:
            return None
        if labels.min() < 0 or labels.max() >= self.spec.num_classes:
            return None
        counts = np.bincount(labels, minlength=self.spec.num_classes)
        return dict(zip(self.spec.classes, counts.tolist(), strict=True))


class ArrayDataset:
    """A data set in memory. A batch is one gather, not a Python call per sample.

    Args:
        images: uint8 [N, C, H, W].
        labels: [N], kept as int64.
    """

    draws = False

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[Any]) -> None:
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images and {len(labels)} labels")
        self.images = torch.from_numpy(np.ascontiguousarray(images))
        self.labels = torch.from_numpy(labels.astype(np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, ids: Sequence[int] | Ids) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(ids, dtype=torch.int64)
        # copies image by image; indexing with [...] copies byte by byte and takes five times as long
        return self.images.index_select(0, index), self.labels.index_select(0, index)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(tuple(self.images.shape)).encode())
        for tensor in (self.images, self.labels):
            digest.update(tensor.numpy().reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def innermost_dataset(dataset: Any) -> Any:
    """What lies below subsets; a class derived from Subset, which may transform its samples, is none."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def fingerprint(dataset: Any) -> str:
    """SHA-256 of what a dataset holds, where it can tell by a method `fingerprint`; else of its type and length."""
    if type(dataset) is Subset:
        ids = np.asarray(dataset.indices, dtype=np.int64).tobytes()
        return hashlib.sha256(ids + fingerprint(dataset.dataset).encode()).hexdigest()
    if hasattr(dataset, "fingerprint"):
        return str(dataset.fingerprint())
    return hashlib.sha256(f"{type(dataset).__qualname__} {len(dataset)}".encode()).hexdigest()


def labels_of(dataset: Any) -> Ids:
    """The labels of all samples, [n], without making one: its `labels` or `targets`.

    Raises:
        UserError: it has neither, or they are not one whole number for each sample.
    """
    if type(dataset) is Subset:
        return labels_of(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
    labels = np.asarray(getattr(dataset, "labels", getattr(dataset, "targets", ())))
    if labels.shape != (len(dataset),) or labels.dtype.kind not in "iu":
        raise UserError(
            f"data: a {type(dataset).__name__} can't say its labels; give it an attribute labels or targets, a whole "
            "number for each sample"
        )
    return labels.astype(np.int64)


def fetch(dataset: Any, ids: Ids, seed: int = 0, epoch: int | Ids = 0) -> Any:
    """The samples `ids` of a map-style dataset, collated by its own `collate_fn`, if it has one, else by torch's.

    Items are fetched one by one, and random transforms inside the dataset draw from (seed, epoch, sample id): neither
    worker count nor layout nor resume moves them. An evaluation gives no seed and no epoch: each one sees the same.
    Where `__getitems__` returns something else than a list, that is the batch, and draws from its first sample's.
    A class that says `draws = False` draws nothing, and is spared this; one derived from it must say so itself.
    """
    while type(dataset) is Subset:
        dataset, ids = dataset.dataset, np.asarray(dataset.indices)[ids]
    batched = hasattr(dataset, "__getitems__")
    if not vars(type(dataset)).get("draws", True):
        samples = dataset.__getitems__(ids) if batched else [dataset[index] for index in ids.tolist()]
        return _collated(dataset, samples) if isinstance(samples, list) else samples
    items = []
    with isolate_rng(include_cuda=False):
        for at, key in enumerate(hash64(seed, 0x5A3B, epoch, ids).tolist()):
            random.seed(key)
            np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002  what people's transforms draw from
            torch.random.default_generator.manual_seed(key >> 1)
            samples = dataset.__getitems__(ids[at : at + 1]) if batched else [dataset[int(ids[at])]]
            if not isinstance(samples, list):
                return dataset.__getitems__(ids)
            items += samples
    return _collated(dataset, items)


def _collated(dataset: Any, items: list[Any]) -> Any:
    collate = getattr(dataset, "collate_fn", default_collate)
    try:
        return collate(items)
    except TypeError as error:  # torch's line, which names what it can't collate, is long
        if collate is not default_collate:
            raise
        item = items[0]
        parts = item if isinstance(item, tuple | list) else [item]
        kinds = ", ".join(type(part).__module__.partition(".")[0] + "." + type(part).__name__ for part in parts)
        raise UserError(
            f"data: an item of {type(dataset).__name__} is ({kinds.replace('builtins.', '')}): must be (image, label), "
            "the image a uint8 or float tensor [C, H, W]; torchvision.transforms.v2.PILToTensor() makes it of a PIL one"
        ) from error
