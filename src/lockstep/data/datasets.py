"""Data sets: what is known about their samples, and the fetching of a batch."""

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from lockstep.arithmetic.order import hash64
from lockstep.data.seeding import Generators, seed_all
from lockstep.errors import UserError
from lockstep.launch.failures import no_silent_end

Ids = NDArray[np.int64]
Weights = NDArray[np.float64]
UNLABELLED = 255  # the value in masks of pixels that do not count
READ_AT_ONCE, READING_SECONDS = 64, 60.0  # of samples that are read for their labels: of one batch; the longest time
COMPARED = 8  # samples whose labels are compared with those of an attribute
ROWS = 32  # samples of each attribute in a digest, from the first to the last
FEW = 16  # a longer list that is not one value for each sample is not searched for a digest


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
    resident = False  # True: images and labels are copies on a GPU, where batches are gathered, with the same bits

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
        if self.images.is_cuda:  # pinned memory: without it, the host would wait for the copy
            index = index.pin_memory().to(self.images.device, non_blocking=True)
        # `index_select` copies whole images. `self.images[index]` copies byte by byte and takes five times as long.
        return self.images.index_select(0, index), self.labels.index_select(0, index)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the images and labels, in hex."""
        digest = hashlib.sha256(repr(tuple(self.images.shape)).encode())
        for tensor in (self.images, self.labels):
            digest.update(tensor.numpy().reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


class Wrapper:
    """A data set that changes the samples or the batches of another one, of which it has the length and the labels.

    Args:
        dataset: map-style.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def labels(self) -> Ids | None:
        """The labels of all samples, see `labels_of`."""
        return labels_of(self.dataset)


def innermost_dataset(dataset: Any, in_wrappers: bool = False) -> Any:
    """Return the data set inside all `Subset`s, and if `in_wrappers` inside what changes its samples or batches.

    Do not open a class derived from Subset: it may change samples.
    """
    while type(dataset) is Subset or (in_wrappers and isinstance(dataset, Wrapper)):
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


def digest_of(dataset: Any) -> str | None:
    """Return a SHA-256, in hex, of some values that a data set's attributes have for its samples; None without any.

    It tells other data of the same class and length from the same data. The values are arrays, tensors and lists of
    the data set's length, also in the data sets inside it: images in memory, labels, names of files without their
    folders. No method is called and no sample is loaded, since that might draw random numbers, count or open files.
    Data that is made or read for each sample is unknown.
    """
    digest, known = hashlib.sha256(), False
    for name, values in _values_of_samples(dataset, "", set()):
        for index in np.unique(np.linspace(0, len(values) - 1, ROWS).astype(np.int64)).tolist():
            content = _bytes_of(values[index])
            if content is None:
                break
            digest.update(f"{name} {index} ".encode() + content)
            known = True
    return digest.hexdigest() if known else None


def _values_of_samples(dataset: Any, above: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of those attributes that have one value for each sample of their data set."""
    if id(dataset) in seen or not hasattr(dataset, "__len__"):
        return
    seen.add(id(dataset))
    length = len(dataset)
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        parts = value if isinstance(value, list | tuple) and len(value) != length and len(value) <= FEW else [value]
        for number, part in enumerate(parts):
            if isinstance(part, Dataset):
                yield from _values_of_samples(part, f"{above}{name}{number}.", seen)
            elif length and isinstance(part, Tensor | np.ndarray | list | tuple) and _length(part) == length:
                yield f"{above}{name}{number}", part


def _length(values: Any) -> int:
    return len(values) if getattr(values, "ndim", 1) else 0


def _bytes_of(value: Any) -> bytes | None:
    """Return the bytes of a plain value; None if it is none."""
    if isinstance(value, Tensor):
        if value.is_sparse or value.is_quantized or value.is_meta:
            return None
        value = value.detach().cpu().contiguous().flatten()
        return repr((value.dtype, value.shape)).encode() + bytes(value.view(torch.uint8).numpy().data)
    if isinstance(value, np.ndarray | np.generic):
        return None if value.dtype.hasobject else f"{value.dtype} {value.shape}".encode() + value.tobytes()
    if isinstance(value, str | PurePath):
        return Path(value).name.encode(errors="surrogateescape")
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool | int | float | None):
        return repr(value).encode()
    if isinstance(value, list | tuple):
        parts = [_bytes_of(each) for each in value]
        return None if None in parts else b" ".join(part for part in parts if part is not None)
    return None


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


def labels_of(dataset: Any) -> Ids | None:
    """Return the labels of all samples, int64 [n]; None if they are unknown. Load no sample.

    They are the attribute `labels` or `targets`, the second tensor of a TensorDataset, or those of the data sets inside
    a Subset or a ConcatDataset.
    """
    for values in _candidates(dataset, "labels", "targets"):
        labels = _array(values)
        if labels.shape == (len(dataset),) and labels.dtype.kind in "iu":
            return labels.astype(np.int64, copy=False)  # a copy of a memory-mapped array could be large
    if type(dataset) is Subset:
        inner = labels_of(dataset.dataset)
        return None if inner is None else inner[np.asarray(dataset.indices, dtype=np.int64)]
    if type(dataset) is ConcatDataset:
        known = [each for part in dataset.datasets if (each := labels_of(part)) is not None]
        return np.concatenate(known) if len(known) == len(dataset.datasets) else None
    return None


def unknown_labels(dataset: Any) -> UserError:
    """Return the error about a data set whose labels are unknown."""
    return UserError(
        f"data: the labels of a {type(innermost_dataset(dataset, in_wrappers=True)).__name__} are unknown: give it an "
        "attribute labels or targets with one whole number for each sample"
    )


def read_labels(dataset: Any) -> Ids:
    """Return the labels of all samples, int64 [n]: as `labels_of` does, or else from the samples themselves."""
    if (labels := labels_of(dataset)) is None:
        return _labels_of_samples(dataset)
    compared = np.unique(np.linspace(0, len(dataset) - 1, COMPARED).astype(np.int64))
    for index, label in zip(compared, _labels_in(fetch(dataset, compared), len(compared)), strict=False):
        if label != labels[index]:
            raise UserError(
                f"data: sample {index} has the label {label}, and the data set's attribute labels or targets has "
                f"{labels[index]} there: give it an attribute labels with the labels of its samples"
            )
    return labels


def _labels_of_samples(dataset: Any) -> Ids:
    """Return the labels of all samples from the samples."""
    count, parts, began = len(dataset), [], time.monotonic()
    for start in range(0, count, READ_AT_ONCE):
        ids = np.arange(start, min(start + READ_AT_ONCE, count))
        labels = _labels_in(fetch(dataset, ids), len(ids))
        if len(labels) != len(ids):
            raise unknown_labels(dataset)
        parts.append(labels)
        seconds = (time.monotonic() - began) / (ids[-1] + 1) * count
        if seconds > READING_SECONDS:
            takes = f"to read {count:,} samples for their labels would take {seconds:.0f} s"
            raise UserError(f"{unknown_labels(dataset)} ({takes})")
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
    if not weights.any():
        raise UserError(f"data: {name}: all samples have the weight 0: some must have more")
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
    if isinstance(dataset, Subset | Wrapper):
        set_epoch_of(dataset.dataset, epoch)
    elif isinstance(dataset, ConcatDataset):
        for each in dataset.datasets:
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
            return _whole(dataset, items)
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
                return _whole(dataset, dataset.__getitems__(ids))
            items += samples
        if not collates:
            return _collated(dataset, items)
        key = int(hash64(seed, 0xC0AA, np.reshape(epoch, -1)[:1], ids[:1])[0])
        seed_all(key)
        generators.seed(key)
        return _collated(dataset, items)


def _whole(dataset: Any, batch: Any) -> Any:
    """Return a whole batch of `__getitems__`; a loader's own `collate_fn` gets it, as torch's loader passes it on."""
    return dataset.collate_fn(batch) if isinstance(dataset, Wrapper) and hasattr(dataset, "collate_fn") else batch


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
