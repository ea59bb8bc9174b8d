"""Data sets: sources, splits, the description of their images, and the fetching of a batch."""

import hashlib
import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from lockstep.arithmetic.layout import Layout
from lockstep.arithmetic.order import DataOrder, hash64
from lockstep.arithmetic.streams import StreamOrder
from lockstep.data.augment import Augment
from lockstep.data.samplers import DrawnOrder, Draws
from lockstep.data.seeding import Generators, seed_all
from lockstep.errors import UserError
from lockstep.launch.failures import no_silent_end

Ids = NDArray[np.int64]
Weights = NDArray[np.float64]
Sizes = tuple[tuple[int, int], ...]  # width and height of image files
UNLABELLED = 255  # the value in masks of pixels that do not count
READ_AT_ONCE, READING_SECONDS = 64, 60.0  # of samples that are read for their labels: of one batch; the longest time
COMPARED = 8  # samples whose labels are compared with those of an attribute
# The tasks of a data set, each with the noun for its `classes`.
TASKS = {"classification": "classes", "multi_label": "labels", "regression": "values", "segmentation": "classes"}


@dataclass(frozen=True)
class Spec:
    """The description of a data set's images, for the model.

    Attributes:
        channels: usually 1 (grey) or 3 (RGB).
        image_size: height and width in pixels.
        classes: names of the classes, in the order of the labels.
        mean: mean of each channel, of pixels in 0..1. uint8 images are normalised with it on the device. Float images
            are already normalised. Callbacks that draw images undo the normalisation with it.
        std: standard deviation of each channel, used like `mean`.
        task: the target of a sample. `classification`: the number of its class. `multi_label`: 0 or 1 for each of
            `classes`, float [k]. `regression`: a number for each of `classes`, float [k]. `segmentation`: a mask with
            the class of each pixel, uint8 [image_size, image_size]; UNLABELLED stands for pixels that do not count.

    Raises:
        ValueError: there is no such task.
    """

    channels: int
    image_size: int
    classes: tuple[str, ...]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    task: str = "classification"

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task={self.task}: must be one of {', '.join(TASKS)}")
        # Convert numpy's numbers and strings: a Spec is saved in checkpoints, and a safe load would refuse them.
        for name in ("channels", "image_size"):
            object.__setattr__(self, name, int(getattr(self, name)))
        for name, kind in (("classes", str), ("mean", float), ("std", float)):
            object.__setattr__(self, name, tuple(map(kind, getattr(self, name))))

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)


def same_classes(one: Sequence[str], other: Sequence[str]) -> bool:
    """Check whether two lists have the same classes in the same order. Unicode's forms of a name are the same.

    A file system may change the form, and older versions recorded names with blanks at their ends.
    """
    names = ([unicodedata.normalize("NFC", name).strip() for name in each] for each in (one, other))
    return next(names) == next(names)


@dataclass(frozen=True)
class Source:
    """The map-style data sets of `(image, label)` that an opener returns. A file of conf/data/ names the opener.

    Images are uint8 `[C, H, W]`, which are normalised on the device, or float `[C, H, W]`, which are used as they are.

    Attributes:
        train: the training set.
        test: the test set; None: there is no test.
        spec: the description of the images.
        val: the validation set; None: a part of `train` is held out for validation.
        val_candidates: the samples of `train`, in its order, without the augmentation that `train` does itself. The
            part that is held out for validation is taken from it; None: it is taken from `train`.
        about: a line for the log at a run's start.
        split_by_opener: whether the opener has split one set of samples into train, val and test by itself. A model
            that was trained on other images is then tested on all samples, see `choose_test_images`.
        sample_weights: one weight for each sample of `train`: the samples of an epoch are drawn by weight. None: those
            of the attribute `sample_weights` of `train`, if it has one.
        window: shards from which each piece of a step draws samples at a time; `train` is then a
            `lockstep.data.streams.ShardedDataset`. None: an epoch is one permutation of all samples.
        file_sizes: width and height of some of the image files, for a line at a run's start.
    """

    train: Any
    test: Any
    spec: Spec
    val: Any = None
    val_candidates: Any = None
    about: str = ""
    split_by_opener: bool = False
    sample_weights: Any = None
    window: int | None = None
    file_sizes: Sizes = ()


@dataclass(frozen=True)
class SampleSets:
    """The data sets of a run, whatever their samples are, and how the training samples are drawn.

    Attributes:
        train: the training set, map-style; None in an evaluation of other data.
        val: the validation set, or None.
        test: the test set, or None.
        weights: for weighted sampling, the weight of each training sample, float64 [n]; None: each sample counts once.
        shuffle: see `DataOrder`.
        drop_last: see `DataOrder`.
        most: see `DataOrder`.
        draws: gives the samples of each epoch in place of all that; None: nothing does.
    """

    train: Any
    val: Any
    test: Any
    _: KW_ONLY
    weights: Weights | None = None
    shuffle: bool = True
    drop_last: bool = False
    most: int | None = None
    draws: Draws | None = None

    def order(self, layout: Layout, seed: int) -> DataOrder:
        """Return the order of the training samples for a layout."""
        samples = 0 if self.train is None else len(self.train)
        if self.draws is not None:
            return DrawnOrder(samples, layout, seed, drop_last=self.drop_last, most=self.most, draws=self.draws)
        return DataOrder(samples, layout, seed, None, self.weights, self.shuffle, self.drop_last, self.most)


@dataclass(frozen=True)
class Splits(SampleSets):
    """An opened data set of images, ready to be cut into steps.

    Attributes:
        spec: the description of the images.
        fingerprint: SHA-256 of the data (see `fingerprint`), in hex.
        content: see `content_of`; None: unknown.
        augment: shifts and flips of training images.
        balanced: whether an epoch has equally many samples of each class.
        labels: for balanced sampling, the class of each training sample, int64 [n]; None: see `labels_of`.
        window: see `Source`.
        shard_borders: with a window, those of the training set, see `ShardedDataset`.
        mix: None, or a function that mixes the samples of a piece: it takes images and labels and returns images and
            labels [n, classes].
        about: see `Source`.
        split_by_opener: see `Source`.
        file_sizes: see `Source`.
    """

    spec: Spec
    fingerprint: str
    augment: Augment = field(default_factory=Augment)
    balanced: bool = False
    mix: Any = None
    about: str = ""
    split_by_opener: bool = False
    labels: Ids | None = None
    window: int | None = None
    shard_borders: Ids | None = None
    content: str | None = None
    file_sizes: Sizes = ()

    def order(self, layout: Layout, seed: int) -> DataOrder:
        """Return the order of the training samples for a layout; with `balanced`, raise what `train_labels` raises."""
        if self.window is not None and self.shard_borders is not None:
            return StreamOrder(len(self.train), layout, seed, shard_borders=self.shard_borders, window=self.window)
        return DataOrder(len(self.train), layout, seed, self.train_labels() if self.balanced else None, self.weights)

    def train_labels(self) -> Ids:
        """Return the labels of the training samples, int64 [n]; raise what `labels_of` raises."""
        return labels_of(self.train) if self.labels is None else self.labels

    @property
    def sizes(self) -> dict[str, int | None]:
        """The number of samples of train, val and test; None if there is no such split."""
        datasets = {"train": self.train, "val": self.val, "test": self.test}
        return {name: None if dataset is None else len(dataset) for name, dataset in datasets.items()}

    def classes_of(self, dataset: Any) -> Ids | None:
        """Return the class of each sample of one of the splits, int64 [n]; None if a sample has no class or several."""
        try:
            labels = labels_of(dataset)
        except UserError:
            return None
        valid = len(labels) and labels.min() >= 0 and labels.max() < self.spec.num_classes
        return labels if valid and self.spec.task == "classification" else None

    def class_counts(self) -> dict[str, int] | None:
        """Return the number of training samples of each class, by name, in the order of the labels.

        Returns:
            The counts; None if the data set has no attribute with its labels, or a label is not the number of a class,
            or with a window: the labels of so many samples are not read for a line of a report.
        """
        labels = self.classes_of(self.train) if self.window is None else None
        if labels is None:
            return None
        counts = np.bincount(labels, minlength=self.spec.num_classes)
        return dict(zip(self.spec.classes, counts.tolist(), strict=True))


class ArrayDataset:
    """A data set in memory. One `index_select` copies a batch, without a Python call per sample.

    Args:
        images: uint8 [N, C, H, W].
        labels: integers [N]; or several targets of each sample: floats [N, k], or masks, uint8 [N, H, W].

    Attributes:
        images: uint8 tensor [N, C, H, W].
        labels: int64 tensor [N], float32 tensor [N, k] or uint8 tensor [N, H, W].
        uses_random_numbers: False: a sample is always the same; see `fetch`.

    Raises:
        ValueError: there are not as many labels as images, or a label [N] is no whole number.
    """

    uses_random_numbers = False

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[Any]) -> None:
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images and {len(labels)} labels: there must be one label for each image")
        if labels.ndim == 1 and labels.dtype.kind == "f" and (labels != np.trunc(labels)).any():
            at = int(np.flatnonzero(labels != np.trunc(labels))[0])
            raise ValueError(f"sample {at} has the label {labels[at]:g}: it must be a whole number, or floats [N, k]")
        self.images = torch.from_numpy(np.ascontiguousarray(images))
        dtype_of_multi_target = np.float32 if labels.dtype.kind == "f" else labels.dtype
        self.labels = torch.from_numpy(labels.astype(np.int64 if labels.ndim == 1 else dtype_of_multi_target))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, ids: Sequence[int] | Ids) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(ids, dtype=torch.int64)
        # `index_select` copies whole images. `self.images[index]` copies byte by byte and takes five times as long.
        return self.images.index_select(0, index), self.labels.index_select(0, index)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the images and labels, in hex."""
        digest = hashlib.sha256(repr(tuple(self.images.shape)).encode())
        for tensor in (self.images, self.labels):
            digest.update(tensor.numpy().reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


class Resident(ArrayDataset):
    """A data set in memory whose images and labels are on `device`, copied once.

    Batches are gathered there, with the same bits, and only sample ids are sent.
    """

    uses_random_numbers = False

    def __init__(self, dataset: ArrayDataset, device: torch.device) -> None:
        self.images, self.labels = dataset.images.to(device), dataset.labels.to(device)

    def __getitems__(self, ids: Sequence[int] | Ids) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(ids, dtype=torch.int64)
        if self.images.is_cuda:  # pinned memory: without it, the host would wait for the copy
            index = index.pin_memory().to(self.images.device, non_blocking=True)
        return self.images.index_select(0, index), self.labels.index_select(0, index)


def innermost_dataset(dataset: Any) -> Any:
    """Return the data set inside all `Subset`s. Do not open a class derived from Subset: it may change samples."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def fingerprint(dataset: Any) -> str:
    """Return a data set's SHA-256, in hex: from its method `fingerprint`, else of its type's name and its length."""
    if type(dataset) is Subset:
        digest = hashlib.sha256(np.ascontiguousarray(dataset.indices, dtype=np.int64).data)
        digest.update(fingerprint(dataset.dataset).encode())
        return digest.hexdigest()
    if hasattr(dataset, "fingerprint"):
        return str(dataset.fingerprint())
    return hashlib.sha256(f"{type(dataset).__qualname__} {len(dataset)}".encode()).hexdigest()


def content_of(datasets: Iterable[Any]) -> str | None:
    """Return a SHA-256 of the bytes of all samples, in hex; None if a data set does not know its own.

    A fingerprint has the names and sizes of images, which a folder and a server agree on; only a server's index knows
    the bytes.
    """
    known = [getattr(innermost_dataset(each), "content_sha256", None) for each in datasets]
    if None in known:
        return None
    return hashlib.sha256("".join(str(each()) for each in known if each is not None).encode()).hexdigest()


def differ(one: Any, other: Any) -> bool:
    """Check whether two contents differ, see `content_of`. One that is unknown differs from none."""
    return bool(one and other and one != other)


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the names of the facts about a run that have changed, sorted. `content` is that of `content_of`."""
    return [
        name
        for name in sorted({*old, *new})
        if (differ(old.get(name), new.get(name)) if name == "content" else old.get(name) != new.get(name))
    ]


def is_other_data(recorded: Mapping[str, Any], splits: Splits) -> bool:
    """Check whether a data set has other samples than that of a checkpoint, as far as both are known.

    Args:
        recorded: the checkpoint's record: `fingerprint`, and `content` unless an older version wrote it.
    """
    return recorded.get("fingerprint") != splits.fingerprint or differ(recorded.get("content"), splits.content)


def labels_of(dataset: Any) -> Ids:
    """Return the labels of all samples, int64 [n]. Load no sample.

    They are the attribute `labels` or `targets`, the second tensor of a TensorDataset, or those of the data sets inside
    a Subset or a ConcatDataset.

    Raises:
        UserError: there is no such attribute, or it is not one whole number for each sample.
    """
    for values in _candidates(dataset, "labels", "targets"):
        labels = _array(values)
        if labels.shape == (len(dataset),) and labels.dtype.kind in "iu":
            return labels.astype(np.int64, copy=False)  # a copy of a memory-mapped array could be large
    if type(dataset) is Subset:
        return labels_of(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
    if type(dataset) is ConcatDataset:
        return np.concatenate([labels_of(part) for part in dataset.datasets])
    raise UserError(
        f"data: the labels of a {type(dataset).__name__} are unknown: give it an attribute labels or targets with "
        "one whole number for each sample"
    )


def read_labels(dataset: Any) -> Ids:
    """Return the labels of all samples, int64 [n]: as `labels_of` does, or else from the samples, one after the other.

    Raises:
        UserError: a sample has no label that is a whole number, an attribute has other labels than the samples, or
            reading them would take more than READING_SECONDS.
    """
    try:
        labels = labels_of(dataset)
    except UserError as unknown:
        return _labels_of_samples(dataset, unknown)
    compared = np.unique(np.linspace(0, len(dataset) - 1, COMPARED).astype(np.int64))
    for index, label in zip(compared, _labels_in(fetch(dataset, compared), len(compared)), strict=False):
        if label != labels[index]:
            raise UserError(
                f"data: sample {index} has the label {label}, and the data set's attribute labels or targets has "
                f"{labels[index]} there: give it an attribute labels with the labels of its samples"
            )
    return labels


def _labels_of_samples(dataset: Any, unknown: UserError) -> Ids:
    """Return the labels of all samples from the samples; raise `unknown` if they have none."""
    count, parts, began = len(dataset), [], time.monotonic()
    for start in range(0, count, READ_AT_ONCE):
        ids = np.arange(start, min(start + READ_AT_ONCE, count))
        labels = _labels_in(fetch(dataset, ids), len(ids))
        if len(labels) != len(ids):
            raise unknown
        parts.append(labels)
        seconds = (time.monotonic() - began) / (ids[-1] + 1) * count
        if seconds > READING_SECONDS:
            raise UserError(f"{unknown} (to read {count:,} samples for their labels would take {seconds:.0f} s)")
    return np.concatenate(parts)


def _labels_in(batch: Any, count: int) -> Ids:
    """Return the labels of a batch of `count` samples, int64 [count]; empty if it has no whole numbers."""
    labels = _array(batch[1]) if isinstance(batch, tuple | list) and len(batch) > 1 else np.empty(0)
    return labels.astype(np.int64) if labels.shape == (count,) and labels.dtype.kind in "iu" else np.empty(0, np.int64)


def weights_of(dataset: Any) -> Weights | None:
    """Return the weights of all samples, float64 [n], from the attribute `sample_weights`; None if there is none.

    Those of a Subset or a ConcatDataset are the attribute of the data sets inside it.

    Raises:
        UserError: as of `checked_weights`; or only some parts of a ConcatDataset have weights.
    """
    for values in _candidates(dataset, "sample_weights"):
        return checked_weights(values, len(dataset), f"the sample_weights of a {type(dataset).__name__}")
    if type(dataset) is Subset:
        weights = weights_of(dataset.dataset)
        return None if weights is None else weights[np.asarray(dataset.indices, dtype=np.int64)]
    if type(dataset) is ConcatDataset:
        parts = [weights_of(part) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        if known and len(known) < len(parts):
            raise UserError("data: only some data sets of a ConcatDataset have sample_weights: give all of them some")
        return np.concatenate(known) if known else None
    return None


def checked_weights(values: Any, count: int, name: str) -> Weights:
    """Return the weights of `count` samples, float64 [count].

    Args:
        values: an array, a tensor or a list.
        count: number of samples.
        name: what the weights are, for messages.

    Raises:
        UserError: they are not one finite number of 0 or more for each sample.
    """
    weights = _array(values)
    if weights.dtype.kind not in "iuf" or weights.ndim != 1:
        what = f"{weights.dtype} {list(weights.shape)}" if weights.dtype.kind in "iufb" else type(values).__name__
        raise UserError(f"data: {name}: must be numbers [{count}], one for each sample, not {what}")
    if len(weights) != count:
        raise UserError(f"data: {name}: there are {len(weights)}: must be {count}, one for each sample")
    weights = weights.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise UserError(f"data: {name}: sample {wrong[0]} has {weights[wrong[0]]:g}: must be finite, and 0 or more")
    return weights


def _candidates(dataset: Any, *names: str) -> list[Any]:
    """Return a data set's attributes with these names that are not None, and the labels of a TensorDataset."""
    values = [each for name in names if (each := getattr(dataset, name, None)) is not None]
    if "labels" in names and type(dataset) is TensorDataset and len(dataset.tensors) > 1:
        values.append(dataset.tensors[1])
    return values


def _array(values: Any) -> NDArray[Any]:
    """Return values as an array; an empty one if they do not form one."""
    try:
        return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError):
        return np.empty(0, dtype=object)


def set_epoch_of(dataset: Any, epoch: int) -> None:
    """Call the `set_epoch` of a data set, or of those inside it, if they have one."""
    if callable(set_epoch := getattr(dataset, "set_epoch", None)):
        set_epoch(epoch)
        return
    inner = [dataset.dataset] if isinstance(dataset, Subset) else getattr(dataset, "datasets", ())
    for each in inner if isinstance(dataset, Subset | ConcatDataset) else ():
        set_epoch_of(each, epoch)


def fetch(dataset: Any, ids: Ids, seed: int = 0, epoch: int | Ids = 0, generators: Generators | None = None) -> Any:
    """Fetch samples of a map-style data set as a batch.

    Before each sample, the generators of Python, numpy and torch, and those that the data set and its transforms have
    made, are seeded by (seed, epoch, sample id). So random transforms inside the data set do not depend on the number
    of loader processes, the layout or a resume. Before a `collate_fn`, they are seeded by the first sample. The
    generators are not seeded for a class that has `uses_random_numbers = False` itself. A class derived from it is
    seeded, unless it has the attribute too.

    Args:
        dataset: it has `__getitem__`, or `__getitems__`, which returns a list of samples or a whole batch. For a whole
            batch, the generators are seeded by its first sample only.
        ids: the samples' numbers, [n].
        seed: the run's seed. An evaluation gives neither seed nor epoch, so all evaluations get the same samples.
        epoch: one epoch for all samples; or for each sample one number that contains its epoch and its earlier uses,
            [n], see `MicroBatch.epochs_and_repeats`.

        generators: those of the data set; None: search for them.

    Returns:
        The samples, collated by the data set's `collate_fn` if it has one, else by torch's.

    Raises:
        UserError: torch can't collate the samples.
        StepRefused: the data set has raised what would end a loop, or the program, without a word.
    """
    with no_silent_end(SystemExit):
        return _fetched(dataset, ids, seed, epoch, generators)


def _fetched(dataset: Any, ids: Ids, seed: int, epoch: int | Ids, generators: Generators | None) -> Any:
    """Return the batch of `fetch`."""
    while type(dataset) is Subset:
        dataset, ids = dataset.dataset, np.asarray(dataset.indices)[ids]
    has_getitems, collates = hasattr(dataset, "__getitems__"), hasattr(dataset, "collate_fn")
    is_random = vars(type(dataset)).get("uses_random_numbers", True)
    items: Any = []
    if not is_random:
        items = dataset.__getitems__(ids) if has_getitems else [dataset[index] for index in ids.tolist()]
        if not isinstance(items, list):
            return items
        if not collates:
            return _collated(dataset, items)
    generators = generators or Generators(dataset)
    generators.search()
    with isolate_rng(include_cuda=False):
        for index, key in enumerate(hash64(seed, 0x5A3B, epoch, ids).tolist() if is_random else []):
            seed_all(key)
            generators.seed(key)
            samples = dataset.__getitems__(ids[index : index + 1]) if has_getitems else [dataset[int(ids[index])]]
            if generators.search():  # the first sample has made some, which were not seeded for it
                return _fetched(dataset, ids, seed, epoch, generators)
            if not isinstance(samples, list):
                # `__getitems__` returns whole batches, so this batch of one sample was a trial. Fetch all samples, with
                # the generators as the trial has left them.
                return dataset.__getitems__(ids)
            items += samples
        if not collates:
            return _collated(dataset, items)
        key = int(hash64(seed, 0xC0AA, np.reshape(epoch, -1)[:1], ids[:1])[0])
        seed_all(key)
        generators.seed(key)
        return _collated(dataset, items)


def _collated(dataset: Any, items: list[Any]) -> Any:
    """Return the batch of some samples; raise what `fetch` raises."""
    collate = getattr(dataset, "collate_fn", default_collate)
    try:
        return collate(items)
    except TypeError as error:  # the message of torch's `default_collate` is long
        if collate is not default_collate:
            raise
        item = items[0]
        parts = item if isinstance(item, tuple | list) else [item]
        kinds = ", ".join(type(part).__module__.partition(".")[0] + "." + type(part).__name__ for part in parts)
        raise UserError(
            f"data: an item of {type(dataset).__name__} is ({kinds.replace('builtins.', '')}): must be (image, label), "
            "the image a uint8 or float tensor [C, H, W]; torchvision.transforms.v2.PILToTensor() converts a PIL image"
        ) from error
