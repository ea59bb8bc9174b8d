"""LightningDataModules as sources of data: Lockstep takes their data sets and uses its own sampler."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from lockstep.data.datasets import Source, Spec, Weights, fetch, labels_of
from lockstep.data.loader_sets import Collated, refuse_transfers, set_of_loader
from lockstep.data.transforms import moments
from lockstep.errors import UserError
from lockstep.lightning.hooks import overrides_method


def source_of(module: pl.LightningDataModule, split_seed: int) -> Source:
    """Return the data sets of a LightningDataModule's loaders, after `prepare_data` and `setup`.

    Args:
        split_seed: seeds the random numbers of its methods, so that each start of a run has the same split.

    Raises:
        UserError: a loader does more than drawing samples of a map-style data set, or the classes are unknown.
    """
    name = type(module).__name__
    refuse_transfers(module)
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
    where, trains = f"data: the {method} of {type(module).__name__}", method == "train_dataloader"
    taken = set_of_loader(loader, where, trains, other_draws="data.sampling=balanced, or sample_weights")
    return (taken.dataset, taken.weights) if taken else (None, None)


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
