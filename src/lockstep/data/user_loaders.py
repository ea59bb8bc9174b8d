"""What users' torch DataLoaders read, and how they draw samples: a `Split` for each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from lockstep.data.datasets import Weights, Wrapper, checked_weights, innermost_dataset, weights_of
from lockstep.data.iterables import StreamSamples
from lockstep.data.samplers import Draws, draws_itself, of_all_ranks
from lockstep.data.splits import Split
from lockstep.errors import UserError

NO_BATCH_SIZE = "a batch_sampler or no batch_size: use batch_size instead"


class _Collated(Wrapper):
    """A data set with the `collate_fn` of its loader.

    Args:
        dataset: a map-style data set. Other attributes are looked up in it.
        collate_fn: makes a batch of a list of samples.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        super().__init__(dataset)
        self.collate_fn = collate_fn

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    @property
    def sample_weights(self) -> Weights | None:
        """The weights of all samples, or None; raises what `weights_of` raises."""
        return weights_of(self.dataset)

    def __getattr__(self, name: str) -> Any:  # for its fingerprint, for example
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def read_loaders(loaders: Any, where: str, trains: bool, seed: int) -> list[Split]:
    """Return the data set of each of a user's loaders, in Lightning's order; an empty list without one.

    Args:
        loaders: DataLoaders or map-style data sets: one, or in lists, tuples and dicts.
        where: see `read_loader`.
        trains: see `read_loader`. Then there must be one.
        seed: see `read_loader`.

    Raises:
        UserError: one of them can't be used; see `read_loader`.
    """
    each_loader = _flattened(loaders)
    if trains and isinstance(loaders, Mapping | list | tuple) and each_loader:
        right = "give the loader itself"
        if len(each_loader) > 1:
            right = "join the data sets, by torch's ConcatDataset or StackDataset"
        raise UserError(
            f"{where} returns a {type(loaders).__name__}: it must be one torch DataLoader, since a step is cut from "
            f"one order of samples: {right}"
        )
    sets = []
    for number, loader in enumerate(each_loader):
        name = where if len(each_loader) == 1 else where.replace("_dataloader", f"_dataloader[{number}]", 1)
        if is_plain_dataset(loader):
            sets.append(Split(loader, num_workers=0, shuffle=trains))
        elif (made := read_loader(loader, name, trains, seed)) is not None:
            sets.append(made)
    return [replace(each, whole=loaders) for each in sets]


def is_plain_dataset(value: Any) -> bool:
    """Check whether a value is a map-style data set, and no loader or batch."""
    if isinstance(value, DataLoader | IterableDataset | Mapping | Sequence | Tensor):
        return False
    return hasattr(value, "__getitem__") and hasattr(value, "__len__")


def _flattened(loaders: Any) -> list[Any]:
    """Return the loaders in lists, tuples and dicts, in order."""
    if isinstance(loaders, Mapping):
        return _flattened(list(loaders.values()))
    if isinstance(loaders, list | tuple):
        return [each for part in loaders for each in _flattened(part)]
    return [] if loaders is None else [loaders]


def read_loader(loader: Any, where: str, trains: bool, seed: int | None = None, other_draws: str = "") -> Split | None:
    """Return the data set of a loader and how it draws samples; None if there is no loader.

    Args:
        loader: one DataLoader, alone or in a list; None or an empty list: no loader.
        where: what returns the loader, `data: the train_dataloader of Digits`, for messages.
        trains: whether it is for training.
        seed: seeds the random numbers of samplers; None: samplers are refused.
        other_draws: how a training set can be drawn otherwise than each sample once, for messages.
    """
    if loader is None or (isinstance(loader, list | tuple) and not loader):
        return None
    if isinstance(loader, list | tuple) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        raise UserError(f"{where} returns a {type(loader).__name__}: it must be one torch DataLoader")
    for method in ("__iter__", "__len__"):
        if getattr(type(loader), method) is not getattr(DataLoader, method):
            raise UserError(
                f"{where} returns a {type(loader).__name__} with its own {method}, and batches that it makes can't be "
                "cut into pieces: use torch's DataLoader, and change samples in the data set or in a collate_fn"
            )
    dataset: Any = loader.dataset
    starts_worker = loader.worker_init_fn
    if getattr(starts_worker, "func", starts_worker) is pl_worker_init_function:  # it only seeds random numbers
        starts_worker = None
    if seed is None:
        _refuse_draws(loader, where, trains, starts_worker, other_draws)
    if loader.batch_sampler is None:
        raise UserError(f"{where} has {NO_BATCH_SIZE}")
    samples, weights, draws, stream = dataset, None, None, None
    batch_size, workers, shuffle, drop_last = loader.batch_size, loader.num_workers, False, loader.drop_last
    if isinstance(dataset, IterableDataset):
        if starts_worker is not None:
            raise UserError(f"{where} has a worker_init_fn for an IterableDataset: leave it out, and open in __iter__")
        samples = stream = StreamSamples(dataset, where, seed if trains and seed else 0)
        workers = min(1, workers)  # each process would read the whole stream
    else:
        sampler: Any = loader.sampler
        shuffle = not isinstance(sampler, SequentialSampler) and bool(getattr(sampler, "shuffle", True))
        by_weight = type(sampler) is WeightedRandomSampler and trains
        if by_weight and (seed is None or _draws_all_by_weight(sampler, dataset)):
            weights = _weights(sampler, len(dataset), where)
        elif seed is not None and draws_itself(loader):
            drawing = loader.batch_sampler if batch_size is None else of_all_ranks(sampler)
            draws = Draws(drawing, dataset, where, seed, trains)
            if batch_size is None:
                batch_size, drop_last = draws.batch_size, False
    # torch's function needs no wrapper, unless the data set has a `collate_fn` that its loader does not use
    plain = loader.collate_fn is default_collate and not hasattr(innermost_dataset(dataset), "collate_fn")
    return Split(
        samples if plain else _Collated(samples, loader.collate_fn),
        batch_size,
        workers,
        weights,
        shuffle,
        drop_last,
        draws=draws,
        starts_worker=starts_worker,
        loader=loader,
        stream=stream,
    )


def _refuse_draws(loader: DataLoader[Any], where: str, trains: bool, starts_worker: Any, other_draws: str) -> None:
    """Refuse a loader that does more than drawing samples of a map-style data set: a config has rules for the rest."""
    if isinstance(loader.dataset, IterableDataset):
        raise UserError(f"{where} has an IterableDataset: it must be a map-style data set")
    if loader.batch_size is None:
        raise UserError(f"{where} has {NO_BATCH_SIZE}")
    if starts_worker is not None:
        raise UserError(
            f"{where} has a worker_init_fn, which would not be called: leave it out, since random numbers are seeded "
            "for each sample, and let the data set open what it needs at its first sample"
        )
    sampler = loader.sampler
    if draws_itself(loader) and not (type(sampler) is WeightedRandomSampler and trains):
        right = f"since an epoch has each sample once (or use {other_draws})"
        if isinstance(sampler, SubsetRandomSampler):
            right = "and use torch.utils.data.Subset(dataset, indices) for a part of the samples"
        elif not trains:
            right = "since an evaluation counts each sample once"
        raise UserError(f"{where} has a {type(sampler).__name__}: leave it out, {right}")


def _draws_all_by_weight(sampler: WeightedRandomSampler, dataset: Any) -> bool:
    """Check whether a sampler draws as many samples as there are, with replacement, as `DataOrder` does."""
    whole = len(sampler.weights) == sampler.num_samples == len(dataset)
    return sampler.replacement and whole and sampler.generator is None


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


def innermost_of_user(dataset: Any) -> Any:
    """Return the data set below subsets and loaders' wrappers; of a ConcatDataset the first one."""
    while isinstance(dataset, Subset | Wrapper | ConcatDataset):
        dataset = dataset.datasets[0] if isinstance(dataset, ConcatDataset) else dataset.dataset
    return dataset
