"""What users bring becomes `Splits`: loaders, data modules, a module's own loaders and plain data sets."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.data.datasets import checked_weights, content_of, fetch, fingerprint, labels_of
from lockstep.data.samplers import check_same_order
from lockstep.data.splits import LOADERS, Source, Spec, Split, Splits
from lockstep.data.transforms import moments
from lockstep.data.user_loaders import innermost_of_user, read_loader, read_loaders
from lockstep.errors import UserError
from lockstep.launch.environment import environment
from lockstep.launch.process_group import gather_objects
from lockstep.lightning.hooks import overrides_method
from lockstep.step.batch import split_of_loader
from lockstep.text import join_names

UNCALLED = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class DataModule:
    """Plain data sets for a `lockstep.Trainer`: `trainer.fit(module, DataModule(train=..., val=...))`.

    They are map-style: they have `__getitem__` and `__len__`. A batch is what the data set's own `collate_fn` makes of
    samples, or else torch's. Training draws each sample once in an epoch, and the other parts are read in their order.

    Args:
        train: the training set.
        val: the validation set.
        test: the test set.
        predict: the samples to predict.
        sample_weights: one weight for each training sample, by which the samples of an epoch are drawn.
        num_workers: loader processes of each worker.

    Raises:
        UserError: one of them is no map-style data set, or the weights do not fit.
    """

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        sample_weights: Any = None,
        num_workers: int = 0,
    ) -> None:
        self.train, self.val, self.test, self.predict = train, val, test, predict
        self.num_workers = num_workers
        for name in ("train", "val", "test", "predict"):
            dataset = getattr(self, name)
            map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
            if dataset is not None and (isinstance(dataset, IterableDataset | dict) or not map_style):
                kind = type(dataset).__name__
                raise UserError(f"DataModule({name}=...): a {kind} has no __getitem__ and __len__: it must have both")
        if sample_weights is not None and train is None:
            raise UserError("DataModule(sample_weights=...) without train: give both")
        self.sample_weights = sample_weights
        if sample_weights is not None:
            self.sample_weights = checked_weights(sample_weights, len(train), "sample_weights")


def user_splits(
    trainer: Any,
    stage: str,
    seed: int,
    first: Any = None,
    val_loaders: Any = None,
    datamodule: Any = None,
    module: Any = None,
    before: Any = None,
) -> Splits:
    """Return the data that a user gave a method of the Trainer. All ranks must call it.

    Args:
        trainer: it becomes the `trainer` of a LightningDataModule.
        stage: `fit`, `validate`, `test` or `predict`.
        seed: seeds the random numbers of a LightningDataModule's methods, so that all ranks and each start of a run
            have the same split.
        first: the loaders of the method, or, as Lightning allows, a data module.
        val_loaders: of `fit`: the loaders for validation.
        datamodule: a data module.
        module: the LightningModule. Without a data module, its methods return the loaders that are not given.
        before: the data module of the method before, which an evaluation uses if nothing is given.
    """
    owner, loaders = _data_module(stage, first, val_loaders, datamodule, module), {}
    if owner is None:
        users_loaders = zip(LOADERS[stage].values(), (first, val_loaders), strict=False)
        loaders = {method: each for method, each in users_loaders if each is not None}
        if not loaders and not _methods(module, stage):
            owner = before if stage != "fit" else None
            if owner is None:
                right = "give a DataLoader, a data set, a LightningDataModule or a DataModule"
                raise UserError(f"trainer.{stage} needs data: {right}")
    methods = [each for each in _methods(module if owner is None else owner, stage) if each not in loaders]
    read: dict[str, list[Split]] = {}
    if isinstance(owner, DataModule):
        read = {method: [each] for method in LOADERS[stage].values() if (each := _split_of(owner, method))}
    elif methods:
        owner = module if owner is None else owner
        owner.trainer = trainer
        with prepared(owner, seed):
            owner.setup(trainer.state.fn)  # Lightning's TrainerFn, which is a string, too
            for method in methods:
                where = f"data: the {method} of {type(owner).__name__}"
                read[method] = read_loaders(getattr(owner, method)(), where, method == "train_dataloader", seed)
    for method, each in loaders.items():
        read[method] = read_loaders(each, f"data: the {method} of trainer.{stage}", method == "train_dataloader", seed)
    splits = {}
    for part, method in LOADERS[stage].items():
        of_part = read.get(method, [])
        if stage == "predict":  # as Lightning, which predicts each sample
            of_part = [replace(each, drop_last=False) for each in of_part]
        if not of_part and (part != "val" or stage == "validate"):
            raise UserError(f"trainer.{stage}: there is no {method}: give its data set or loader")
        for number, split in enumerate(of_part):
            if split.stream is not None:
                _bound_stream(split, trainer, method.removesuffix("_dataloader"))
            if not split.samples:
                raise UserError(f"trainer.{stage}: the data set of {method} is empty: give it samples")
            splits[split_of_loader(part, number if len(of_part) > 1 else None)] = split
    _check_same_on_all_ranks(stage, splits)
    firsts = [splits.get(part) or splits.get(split_of_loader(part, 0)) for part in ("train", "val", "test")]
    train, val, test = (each and each.dataset for each in firsts)
    return Splits(train, val, test, loaders=splits, owner=owner)


def _split_of(data: DataModule, method: str) -> Split | None:
    """Return the data set for what a LightningDataModule calls `train_dataloader`, and so on; None if there is none."""
    name = method.removesuffix("_dataloader")
    dataset, weights = getattr(data, name), data.sample_weights if name == "train" else None
    return None if dataset is None else Split(dataset, None, data.num_workers, weights, shuffle=name == "train")


def _data_module(stage: str, first: Any, val_loaders: Any, datamodule: Any, module: Any) -> Any:
    """Return the data module that a user gave a method of the Trainer, see `user_splits`; None if there is none."""
    if isinstance(first, DataModule | pl.LightningDataModule):
        if datamodule is not None:
            raise UserError(f"trainer.{stage} got two data modules: give one")
        first, datamodule = None, first
    if datamodule is None:
        return None
    if first is not None or val_loaders is not None:
        raise UserError(f"trainer.{stage} got loaders and a data module: give one of the two")
    if not isinstance(datamodule, DataModule | pl.LightningDataModule):
        kind = type(datamodule).__name__
        right = "it must be a LightningDataModule or a lockstep.DataModule"
        raise UserError(f"trainer.{stage}: the datamodule is a {kind}: {right}")
    if of_module := _methods(module, stage):
        kind, names = type(module).__name__, join_names(of_module)
        rank_zero_warn(f"trainer.{stage}: {names} of {kind} is not called, since a data module is given")
    return datamodule


def _bound_stream(each: Split, trainer: Any, name: str) -> None:
    """Note how many of the first samples of an IterableDataset can be needed at most: it may have no end."""
    assert each.stream is not None
    size, limit = each.batch_size or 1, getattr(trainer, f"limit_{name}_batches")
    if name == "train":
        size = trainer.batch_size or size
    if isinstance(limit, int):
        each.stream.bound = max(1, limit * size)
    elif name == "train" and trainer.max_steps >= 0:
        # one step more, so that the run ends inside the epoch
        each.stream.bound = (trainer.max_steps + 1) * size * trainer.accumulate_grad_batches
        each.stream.cut_by_steps = True


def _methods(module: Any, stage: str) -> list[str]:
    """Return the names of the methods of a LightningModule or LightningDataModule that return loaders of a stage."""
    kind = next((each for each in (pl.LightningDataModule, pl.LightningModule) if isinstance(module, each)), None)
    names = [each for each in LOADERS[stage].values() if callable(getattr(module, each, None))]
    return [each for each in names if kind is not None and overrides_method(module, each, kind)]


@contextmanager
def prepared(module: Any, seed: int, alone: bool = False) -> Iterator[None]:
    """Return a context in which a module's `setup` and loaders are the same at each start, after its `prepare_data`.

    Args:
        module: a LightningDataModule or LightningModule.
        seed: seeds the random numbers of its methods.
        alone: whether this process prepares the data, whatever its rank, and waits for no other.
    """
    with isolate_rng(include_cuda=False), _same_global_seed():
        pl.seed_everything(seed, workers=False, verbose=False)
        here = environment()
        if alone or (here.local_rank if module.prepare_data_per_node else here.rank) == 0:
            module.prepare_data()
        if not alone:
            gather_objects(None)  # wait until the data are prepared
        pl.seed_everything(seed, workers=False, verbose=False)
        yield


@contextmanager
def _same_global_seed() -> Iterator[None]:
    """Return a context after which `PL_GLOBAL_SEED`, which Lightning's `seed_everything` sets, is what it was."""
    before = os.environ.get("PL_GLOBAL_SEED")
    try:
        yield
    finally:
        os.environ.pop("PL_GLOBAL_SEED", None)
        if before is not None:
            os.environ["PL_GLOBAL_SEED"] = before


def _check_same_on_all_ranks(stage: str, sets: dict[str, Split]) -> None:
    """Check that all ranks have data sets of the same sizes, with the same parts of a `Subset`, and the same order."""
    local = {part: (len(each.dataset), fingerprint(each.dataset)) for part, each in sets.items()}
    contents = {part: content_of([each.dataset]) for part, each in sets.items()}
    by_rank = gather_objects((local, contents))
    # Of a folder the content is unknown. All ranks compare the known ones, so that all raise the error.
    known = [{its.get(part) for _, its in by_rank} - {None} for part in sets]
    if any(each != local for each, _ in by_rank) or any(len(each) > 1 for each in known):
        raise UserError(
            f"trainer.{stage}: the ranks have different data sets: each must have all samples, since Lockstep "
            "divides them"
            + ": leave out what divides by rank or world size"
            * any(each.stream for each in sets.values())
        )
    drawn = {part: each.draws and each.draws.digest(0) for part, each in sets.items()}
    orders = gather_objects({part: (each.batch_size, drawn[part]) for part, each in sets.items()})
    for part in sets:
        method = LOADERS[stage][part.partition(".")[0]]
        check_same_order(f"{method} of trainer.{stage}", [each.get(part) for each in orders])


# --- a LightningDataModule in a config ---


def source_of(module: pl.LightningDataModule, split_seed: int) -> Source:
    """Return the data sets of a LightningDataModule's loaders, after `prepare_data` and `setup`.

    Args:
        split_seed: seeds the random numbers of its methods, so that each start of a run has the same split.
    """
    name = type(module).__name__
    for hook in UNCALLED:
        if overrides_method(module, hook, pl.LightningDataModule):
            raise UserError(f"data: the {hook} of {name} would not be called: move it to the LightningModule")
    if "train_dataloader" not in _methods(module, "fit"):
        raise UserError(f"data: {name} has no train_dataloader: it must return a torch DataLoader")
    splits = {}
    with prepared(module, split_seed, alone=True):
        for stage in ("fit", "test"):
            module.setup(stage)
            for method in _methods(module, stage):
                where, trains = f"data: the {method} of {name}", method == "train_dataloader"
                splits[method] = read_loader(
                    getattr(module, method)(), where, trains, other_draws="data.sampling=balanced, or sample_weights"
                ) or Split(None)
    train, val, test = (splits.get(f"{part}_dataloader", Split(None)) for part in ("train", "val", "test"))
    # what the training loader draws by comes first
    weights = getattr(module, "sample_weights", None) if train.weights is None else train.weights
    return Source(train.dataset, test.dataset, _spec(module, train.dataset), val=val.dataset, sample_weights=weights)


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
    channels, size = x.shape[1:3] if isinstance(x, Tensor) and x.ndim == 4 else (1, 1)
    transform = getattr(innermost_of_user(train), "transform", None)
    mean, std = moments(getattr(transform, "transforms", [transform]))
    if not {len(mean), len(std)} <= {1, channels}:
        mean, std = (0.0,), (1.0,)
    classes = _classes(module, train, y)
    return Spec(channels, size, classes, mean, std, "regression" if classes == ("value",) else "classification")


def _classes(module: Any, train: Any, y: Any) -> tuple[str, ...]:
    """Return the names of the classes: the data set's `classes`, else their numbers; for regression one, `value`."""
    named, number = getattr(innermost_of_user(train), "classes", None), getattr(module, "num_classes", None)
    if isinstance(named, list | tuple) and number in (None, len(named)):
        return tuple(map(str, named))
    if not isinstance(number, int):
        if not (isinstance(y, Tensor) and y.ndim == 1 and y.dtype == torch.int64):
            return ("value",)
        if (labels := labels_of(train)) is None:
            name = type(module).__name__
            raise UserError(f"data: the number of classes is unknown: give {name} an attribute num_classes")
        number = int(labels.max()) + 1
    return tuple(map(str, range(number)))
