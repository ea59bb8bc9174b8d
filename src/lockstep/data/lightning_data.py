"""LightningDataModules as sources of data: Lockstep takes their data sets and uses its own sampler."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from lockstep.data.datasets import Source, Spec, fetch, labels_of
from lockstep.data.transforms import moments
from lockstep.errors import UserError
from lockstep.step.passes import overrides_method

UNCALLED = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Collated:
    """A data set with the `collate_fn` of its loader.

    Args:
        dataset: a map-style data set. Other attributes are looked up in it.
        collate_fn: makes a batch of a list of samples.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:  # for its labels and its fingerprint, for example
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def source_of(module: pl.LightningDataModule, split_seed: int) -> Source:
    """Return the data sets of a LightningDataModule's loaders, after `prepare_data` and `setup`.

    Args:
        split_seed: seeds the random numbers of its methods, so that each start of a run has the same split.

    Raises:
        UserError: a loader does more than drawing samples of a map-style data set, or the classes are unknown.
    """
    name = type(module).__name__
    for hook in UNCALLED:
        if overrides_method(module, hook, pl.LightningDataModule):
            raise UserError(f"data: the {hook} of {name} would not be called: move it to the LightningModule")
    if not overrides_method(module, "train_dataloader", pl.LightningDataModule):
        raise UserError(f"data: {name} has no train_dataloader: it must return a torch DataLoader")
    sets = {"train": None, "val": None, "test": None}
    with isolate_rng(include_cuda=False):
        pl.seed_everything(split_seed, verbose=False)
        module.prepare_data()
        module.setup("fit")
        for split in ("train", "val"):
            sets[split] = _dataset(module, f"{split}_dataloader")
        module.setup("test")
        sets["test"] = _dataset(module, "test_dataloader")
    return Source(sets["train"], sets["test"], _spec(module, sets["train"]), val=sets["val"])


def _dataset(module: pl.LightningDataModule, method: str) -> Any:
    """Return the data set of the loader that a method of `module` returns; None if there is no loader."""
    loader = getattr(module, method)() if overrides_method(module, method, pl.LightningDataModule) else None
    if loader is None or (isinstance(loader, list | tuple) and not loader):
        return None
    where = f"data: the {method} of {type(module).__name__}"
    if isinstance(loader, list | tuple) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        raise UserError(f"{where} returns a {type(loader).__name__}: it must be one torch DataLoader")
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        raise UserError(f"{where} has an IterableDataset: it must be a map-style data set")
    if loader.batch_size is None:
        raise UserError(f"{where} has a batch_sampler or no batch_size: use batch_size instead")
    sampler = loader.sampler
    known = isinstance(sampler, RandomSampler | SequentialSampler | DistributedSampler)
    if not known or getattr(sampler, "replacement", False) or len(dataset) != _samples_drawn(sampler):
        kind = type(sampler).__name__
        raise UserError(
            f"{where} has a {kind}: leave it out, since an epoch has each sample once (or use data.sampling=balanced)"
        )
    collate: Any = loader.collate_fn
    return dataset if collate is default_collate else Collated(dataset, collate)


def _samples_drawn(sampler: Any) -> int:
    """Return the number of samples of an epoch, over all ranks."""
    drawn: Any = sampler.dataset if isinstance(sampler, DistributedSampler) else sampler
    return len(drawn)


def _spec(module: Any, train: Any) -> Spec:
    """Return the description of the images, from the first sample and attributes of the data module and data set."""
    try:
        batch = fetch(train, np.zeros(1, dtype=np.int64))
    except TypeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"data: samples of {type(module).__name__} can't be collated ({reason}): they must be tensors"
        ) from None
    x, y = batch[:2] if isinstance(batch, tuple | list) and len(batch) >= 2 else (None, None)
    images = isinstance(x, Tensor) and x.ndim == 4 and x.shape[2] == x.shape[3]
    channels, size = (x.shape[1], x.shape[2]) if images else (1, 1)
    transform = getattr(_below(train), "transform", None)
    mean, std = moments(getattr(transform, "transforms", [transform]))
    if not {len(mean), len(std)} <= {1, channels}:
        mean, std = (0.0,), (1.0,)
    classes = _classes(module, train, y)
    return Spec(channels, size, classes, mean, std, "regression" if classes == ("value",) else "classification")


def _classes(module: Any, train: Any, y: Any) -> tuple[str, ...]:
    """Return the names of the classes: the data set's `classes`, else their numbers; for regression one, `value`."""
    named, number = getattr(_below(train), "classes", None), getattr(module, "num_classes", None)
    if isinstance(named, list | tuple) and number in (None, len(named)):
        return tuple(map(str, named))
    if not isinstance(number, int):
        if not (isinstance(y, Tensor) and y.ndim == 1 and y.dtype == torch.int64):
            return ("value",)
        try:
            number = int(labels_of(train).max()) + 1
        except UserError:
            name = type(module).__name__
            raise UserError(f"data: the number of classes is unknown: give {name} an attribute num_classes") from None
    return tuple(map(str, range(number)))


def _below(dataset: Any) -> Any:
    """Return the data set below subsets and wrappers; of a ConcatDataset the first one."""
    while isinstance(dataset, Subset | Collated | ConcatDataset):
        dataset = dataset.datasets[0] if isinstance(dataset, ConcatDataset) else dataset.dataset
    return dataset
