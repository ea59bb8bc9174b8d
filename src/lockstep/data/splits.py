"""The data of a run: a `Source` is what an opener returns, `Splits` are its train, val and test, ready for steps."""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.arithmetic.layout import Layout
from lockstep.arithmetic.order import DataOrder
from lockstep.arithmetic.streams import StreamOrder
from lockstep.data.augment import Augment
from lockstep.data.datasets import Ids, Weights, differ, labels_of, unknown_labels
from lockstep.data.iterables import StreamSamples
from lockstep.data.samplers import DrawnOrder, Draws

Sizes = tuple[tuple[int, int], ...]  # width and height of image files
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
    """Check whether two lists have the same classes in the same order. A file system may change Unicode's form."""
    names = ([unicodedata.normalize("NFC", name) for name in each] for each in (one, other))
    return next(names) == next(names)


def classes_of(dataset: Any, spec: Spec) -> Ids | None:
    """Return the class of each sample, int64 [n]; None if they are unknown, or a sample has no class or several."""
    labels = labels_of(dataset) if spec.task == "classification" else None
    if labels is None or not len(labels) or labels.min() < 0 or labels.max() >= spec.num_classes:
        return None
    return labels


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
class Split:
    """One data set of a run, and how its samples are drawn: by Lockstep's rules, or as a user's loader does.

    Attributes:
        dataset: map-style, with the `collate_fn` of a loader; None: there is none.
        batch_size: samples of a loader's batch; None: it follows from the layout.
        num_workers: loader processes of a worker; None: see `StepData`.
        weights: for weighted sampling, the weight of each sample, float64 [n]; None: each sample counts once.
        shuffle: see `DataOrder`.
        drop_last: see `DataOrder`.
        most: see `DataOrder`.
        draws: the loader's sampler, if that decides the order of an epoch.
        starts_worker: the loader's `worker_init_fn`, or None.
        loader: the DataLoader, or None.
        whole: what the user gave or returned: the loader, or several.
        stream: the samples of an IterableDataset; None: the data set is map-style.
    """

    dataset: Any
    batch_size: int | None = None
    num_workers: int | None = None
    weights: Weights | None = None
    shuffle: bool = True
    drop_last: bool = False
    most: int | None = None
    draws: Draws | None = None
    starts_worker: Callable[[int], None] | None = None
    loader: Any = None
    whole: Any = None
    stream: StreamSamples | None = None

    @property
    def samples(self) -> int:
        """The number of samples of an epoch, without those that `drop_last` or a limit leaves out."""
        if self.most is not None:
            return self.most
        count = len(self.dataset) if self.draws is None else self.draws.samples
        return count - (count % self.batch_size if self.drop_last and self.batch_size else 0)

    @property
    def batch_sizes(self) -> int | list[int] | None:
        """The samples of each batch of an evaluation, or of all; None: they follow from the layout."""
        return (self.draws and self.draws.batch_sizes) or self.batch_size

    def order(self, layout: Layout, seed: int, labels: Ids | None = None) -> DataOrder:
        """Return the order of the samples in training for a layout; see `DataOrder`."""
        samples = 0 if self.dataset is None else len(self.dataset)
        if self.draws is not None:
            return DrawnOrder(samples, layout, seed, drop_last=self.drop_last, most=self.most, draws=self.draws)
        return DataOrder(samples, layout, seed, labels, self.weights, self.shuffle, self.drop_last, self.most)


NO_IMAGES = Spec(0, 0, ())  # of samples that are used as the data sets return them

# The loaders of each method of a Trainer, by the split that they read.
LOADERS = {
    "fit": {"train": "train_dataloader", "val": "val_dataloader"},
    "validate": {"val": "val_dataloader"},
    "test": {"test": "test_dataloader"},
    "predict": {"test": "predict_dataloader"},
}


@dataclass(frozen=True)
class Splits:
    """The open data of a run, ready to be cut into steps.

    Attributes:
        train: the training set, map-style; None in an evaluation of other data.
        val: the validation set, or None; of several, the first.
        test: the test set, or None; of several, the first.
        spec: the description of the images; NO_IMAGES: samples are used as they are.
        fingerprint: SHA-256 of the data (see `fingerprint`), in hex.
        content: see `content_of`; None: unknown.
        augment: shifts and flips of training images.
        labels: for balanced sampling, the class of each training sample, int64 [n]: an epoch has equally many samples
            of each class. None: other sampling.
        weights: see `Split`.
        window: see `Source`.
        shard_borders: with a window, those of the training set, see `ShardedDataset`.
        mix: None, or a function that mixes the samples of a piece: it takes images and labels and returns images and
            labels [n, classes].
        about: see `Source`.
        split_by_opener: see `Source`.
        file_sizes: see `Source`.
        loaders: what a user's loaders read, by the name of the split, see `split_of_loader`; empty: there are none.
        owner: the data module, or LightningModule, whose methods have returned loaders; None: none has.
    """

    train: Any
    val: Any
    test: Any
    spec: Spec = NO_IMAGES
    fingerprint: str = ""
    augment: Augment = field(default_factory=Augment)
    mix: Any = None
    about: str = ""
    split_by_opener: bool = False
    labels: Ids | None = None
    weights: Weights | None = None
    window: int | None = None
    shard_borders: Ids | None = None
    content: str | None = None
    file_sizes: Sizes = ()
    loaders: Mapping[str, Split] = field(default_factory=dict)
    owner: Any = None

    def split(self, name: str) -> Split:
        """Return the data set of a split, and how its samples are drawn."""
        weights = self.weights if name == "train" else None
        return self.loaders.get(name) or Split(getattr(self, name), weights=weights)

    def names(self, part: str) -> list[str]:
        """Return the names of the splits that the loaders of `val` or `test` read: one, unless a user has several."""
        return [name for name in self.loaders if name.partition(".")[0] == part] if self.loaders else [part]

    def order(self, layout: Layout, seed: int) -> DataOrder:
        """Return the order of the training samples for a layout."""
        if self.window is not None and self.shard_borders is not None:
            return StreamOrder(len(self.train), layout, seed, shard_borders=self.shard_borders, window=self.window)
        return self.split("train").order(layout, seed, self.labels)

    def train_labels(self) -> Ids:
        """Return the labels of the training samples, int64 [n].

        Raises:
            UserError: they are unknown.
        """
        labels = labels_of(self.train) if self.labels is None else self.labels
        if labels is None:
            raise unknown_labels(self.train)
        return labels

    @property
    def sizes(self) -> dict[str, int | None]:
        """The number of samples of train, val and test; None if there is no such split."""
        datasets = {"train": self.train, "val": self.val, "test": self.test}
        return {name: None if dataset is None else len(dataset) for name, dataset in datasets.items()}

    def class_counts(self) -> dict[str, int] | None:
        """Return the number of training samples of each class, by name, in the order of the labels.

        Returns:
            The counts; None if the data set has no attribute with its labels, or a label is not the number of a class,
            or with a window: the labels of so many samples are not read for a line of a report.
        """
        labels = classes_of(self.train, self.spec) if self.window is None else None
        if labels is None:
            return None
        counts = np.bincount(labels, minlength=self.spec.num_classes)
        return dict(zip(self.spec.classes, counts.tolist(), strict=True))


def is_other_data(recorded: Mapping[str, Any], splits: Splits) -> bool:
    """Check whether a data set has other samples than that of a checkpoint, as far as both are known.

    Args:
        recorded: the checkpoint's record: `fingerprint` and `content`.
    """
    return recorded.get("fingerprint") != splits.fingerprint or differ(recorded.get("content"), splits.content)
