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
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from lockstep.data.datasets import Ids, Source, Spec, Weights, checked_weights, fetch, labels_of, weights_of
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

    @property
    def labels(self) -> Ids:
        """The labels of all samples; raises what `labels_of` raises."""
        return labels_of(self.dataset)

    @property
    def sample_weights(self) -> Weights | None:
        """The weights of all samples, or None; raises what `weights_of` raises."""
        return weights_of(self.dataset)

    def __getattr__(self, name: str) -> Any:  # for its fingerprint, for example
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
    weights = None
    with isolate_rng(include_cuda=False):
        pl.seed_everything(split_seed, verbose=False)
        module.prepare_data()
        module.setup("fit")
        for split in ("train", "val"):
            sets[split], drawn_by = _dataset(module, f"{split}_dataloader")
            weights = drawn_by if split == "train" else weights
        module.setup("test")
        sets["test"], _ = _dataset(module, "test_dataloader")
    if weights is None:  # what the training loader draws by comes first
        weights = getattr(module, "sample_weights", None)
    spec = _spec(module, sets["train"])
    return Source(sets["train"], sets["test"], spec, val=sets["val"], sample_weights=weights)


def _dataset(module: pl.LightningDataModule, method: str) -> tuple[Any, Weights | None]:
    """Return the data set of the loader that a method of `module` returns, and the weights by which it draws samples.

    The data set is None if there is no loader, the weights if it draws each sample once.
    """
    loader = getattr(module, method)() if overrides_method(module, method, pl.LightningDataModule) else None
    if loader is None or (isinstance(loader, list | tuple) and not loader):
        return None, None
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
    collate: Any = loader.collate_fn
    collated = dataset if collate is default_collate else Collated(dataset, collate)
    if type(loader.sampler) is WeightedRandomSampler and method == "train_dataloader":
        return collated, _weights(loader.sampler, len(dataset), where)
    _refuse_other_samplers(loader.sampler, len(dataset), where)
    return collated, None


def _weights(sampler: WeightedRandomSampler, samples: int, where: str) -> Weights:
    """Return the weights of a sampler, which must draw as many samples as there are, with replacement."""
    weights = checked_weights(sampler.weights, samples, f"the WeightedRandomSampler of {where[10:]}")
    if not sampler.replacement:
        what = "draws each sample once" if sampler.num_samples == samples else "draws without replacement"
        right = "use shuffle=True for each sample once, or replacement=True"
        raise UserError(f"{where} has a WeightedRandomSampler that {what}: {right}")
    if sampler.num_samples != samples:
        raise UserError(
            f"{where} has a WeightedRandomSampler with num_samples={sampler.num_samples}: must be {samples}, the "
            "training samples, which an epoch counts; for longer or shorter training use max_epochs or max_steps"
        )
    return weights


def _refuse_other_samplers(sampler: Any, samples: int, where: str) -> None:
    """Refuse a sampler that does not yield each sample once, or in an order that Lockstep can't know."""
    known = isinstance(sampler, RandomSampler | SequentialSampler | DistributedSampler)
    if known and not getattr(sampler, "replacement", False) and samples == _samples_drawn(sampler):
        return
    right = "since an epoch has each sample once (or use data.sampling=balanced, or sample_weights)"
    if isinstance(sampler, SubsetRandomSampler):
        right = "and use torch.utils.data.Subset(dataset, indices) for a part of the samples"
    elif not where.startswith("data: the train_"):
        right = "since an evaluation counts each sample once"
    raise UserError(f"{where} has a {type(sampler).__name__}: leave it out, {right}")


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
