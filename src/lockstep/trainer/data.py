"""The data of a `lockstep.Trainer`: plain data sets, DataLoaders or a LightningDataModule."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import IterableDataset, SequentialSampler, get_worker_info

from lockstep.arithmetic.layout import Layout
from lockstep.data.data_module import StepDataModule
from lockstep.data.datasets import Ids, SampleSets, checked_weights, content_of, fingerprint
from lockstep.data.loader_sets import LoaderSet, sets_of_loaders
from lockstep.data.loaders import limited
from lockstep.data.samplers import Draws
from lockstep.errors import UserError
from lockstep.launch.environment import environment
from lockstep.launch.process_group import gather_objects
from lockstep.lightning.hooks import overrides_method
from lockstep.lightning.private_names import take_identity
from lockstep.step.batch import split_of_loader
from lockstep.text import join_names
from lockstep.trainer.parts import refuse_other_package

# The loaders of each method of a Trainer, by the part of `SampleSets` that gets their data set.
LOADERS = {
    "fit": {"train": "train_dataloader", "val": "val_dataloader"},
    "validate": {"val": "val_dataloader"},
    "test": {"test": "test_dataloader"},
    "predict": {"test": "predict_dataloader"},
}


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

    def set_of(self, method: str) -> LoaderSet | None:
        """Return the data set for what a LightningDataModule calls `train_dataloader`, and so on."""
        name = method.removesuffix("_dataloader")
        dataset = getattr(self, name)
        weights = self.sample_weights if name == "train" else None
        return None if dataset is None else LoaderSet(dataset, weights, None, self.num_workers, name == "train", False)


@dataclass(frozen=True)
class UserData:
    """What a user gave a method of the Trainer.

    Attributes:
        owner: a `DataModule`, a LightningDataModule, or None.
        loaders: DataLoaders by the names of the methods of a LightningDataModule, if there is no owner.
        module: the LightningModule. Without an owner, its methods return the loaders that are not given.
    """

    owner: Any
    loaders: dict[str, Any]
    module: Any = None

    def methods_of_module(self, stage: str) -> list[str]:
        """Return the names of the methods of the module that return loaders of a stage."""
        return [] if self.owner else [each for each in _methods(self.module, stage) if self.loaders.get(each) is None]

    def sets(self, trainer: pl.Trainer, stage: str, seed: int) -> dict[str, LoaderSet]:
        """Return the data sets of a stage by the part of `SampleSets`. All ranks must call it.

        Args:
            trainer: it becomes the `trainer` of a LightningDataModule.
            stage: `fit`, `validate`, `test` or `predict`.
            seed: seeds the random numbers of a LightningDataModule's methods, so that all ranks and each start of a
                run have the same split.

        Raises:
            UserError: a loader does more than drawing samples, a set is empty, or the ranks have different ones.
        """
        sets: dict[str, list[LoaderSet]] = {}
        if isinstance(self.owner, DataModule):
            sets = {method: [each] for method in LOADERS[stage].values() if (each := self.owner.set_of(method))}
        elif methods := _methods(self.owner, stage) or self.methods_of_module(stage):
            sets = _sets_of_methods(self.owner or self.module, methods, trainer, stage, seed)
        for method, loaders in self.loaders.items():
            if loaders is not None:
                trains = method == "train_dataloader"
                sets[method] = sets_of_loaders(loaders, f"data: the {method} of trainer.{stage}", trains, seed)
        present = {}
        for part, method in LOADERS[stage].items():
            of_part = sets.get(method, [])
            if not of_part and (part != "val" or stage == "validate"):
                raise UserError(f"trainer.{stage}: there is no {method}: give its data set or loader")
            for number, each in enumerate(of_part):
                if each.stream is not None:
                    _bound_stream(each, trainer, method.removesuffix("_dataloader"))
                if not each.samples:
                    raise UserError(f"trainer.{stage}: the data set of {method} is empty: give it samples")
                present[split_of_loader(part, number if len(of_part) > 1 else None)] = each
        _check_same_on_all_ranks(stage, present)
        return present


def _bound_stream(each: LoaderSet, trainer: Any, name: str) -> None:
    """Note how many of the first samples of an IterableDataset can be needed at most: it may have no end."""
    assert each.stream is not None
    size, limit = each.batch_size or 1, getattr(trainer, f"limit_{name}_batches")
    if isinstance(limit, int):
        each.stream.bound = max(1, limit * size)
    elif name == "train" and trainer.max_steps >= 0:
        # one step more, so that the run ends inside the epoch
        each.stream.bound = (trainer.max_steps + 1) * size * trainer.accumulate_grad_batches
        each.stream.cut_by_steps = True


def user_data(stage: str, first: Any, val_loaders: Any, datamodule: Any, module: Any = None) -> UserData | None:
    """Return what a user gave a method of the Trainer; None if nothing.

    Args:
        stage: `fit`, `validate`, `test` or `predict`.
        first: the loaders of the method, or, as Lightning allows, a data module.
        val_loaders: of `fit`: the loaders for validation.
        datamodule: a data module.
        module: the LightningModule, which may return loaders itself.

    Raises:
        UserError: there are both, or the data module is none.
    """
    of_module = _methods(module, stage)
    for each in (first, datamodule):
        refuse_other_package(f"trainer.{stage}: the data module", each)
    if isinstance(first, DataModule | pl.LightningDataModule):
        if datamodule is not None:
            raise UserError(f"trainer.{stage} got two data modules: give one")
        first, datamodule = None, first
    if datamodule is not None:
        if first is not None or val_loaders is not None:
            raise UserError(f"trainer.{stage} got loaders and a data module: give one of the two")
        if not isinstance(datamodule, DataModule | pl.LightningDataModule):
            kind = type(datamodule).__name__
            right = "it must be a LightningDataModule or a lockstep.DataModule"
            raise UserError(f"trainer.{stage}: the datamodule is a {kind}: {right}")
        if of_module:
            kind, names = type(module).__name__, join_names(of_module)
            rank_zero_warn(f"trainer.{stage}: {names} of {kind} is not called, since a data module is given")
        return UserData(datamodule, {})
    if first is None and val_loaders is None and not of_module:
        return None
    return UserData(None, dict(zip(LOADERS[stage].values(), (first, val_loaders), strict=False)), module)


def _methods(module: Any, stage: str) -> list[str]:
    """Return the names of the methods of a LightningModule or LightningDataModule that return loaders of a stage."""
    kind = next((each for each in (pl.LightningDataModule, pl.LightningModule) if isinstance(module, each)), None)
    return [each for each in LOADERS[stage].values() if kind is not None and overrides_method(module, each, kind)]


def _sets_of_methods(
    module: Any, methods: Sequence[str], trainer: pl.Trainer, stage: str, seed: int
) -> dict[str, list[LoaderSet]]:
    """Return the data sets of methods of a LightningDataModule or LightningModule, after `prepare_data` and `setup`."""
    module.trainer = trainer
    with isolate_rng(include_cuda=False), same_global_seed():
        pl.seed_everything(seed, workers=False, verbose=False)
        here = environment()
        if (here.local_rank if module.prepare_data_per_node else here.rank) == 0:
            module.prepare_data()
        gather_objects(None)  # wait until the data are prepared
        pl.seed_everything(seed, workers=False, verbose=False)
        module.setup(stage)
        return {
            method: sets_of_loaders(
                getattr(module, method)(),
                f"data: the {method} of {type(module).__name__}",
                method == "train_dataloader",
                seed,
            )
            for method in methods
        }


@contextmanager
def same_global_seed() -> Iterator[None]:
    """Return a context after which `PL_GLOBAL_SEED`, which Lightning's `seed_everything` sets, is what it was."""
    before = os.environ.get("PL_GLOBAL_SEED")
    try:
        yield
    finally:
        os.environ.pop("PL_GLOBAL_SEED", None)
        if before is not None:
            os.environ["PL_GLOBAL_SEED"] = before


def _check_same_on_all_ranks(stage: str, sets: dict[str, LoaderSet]) -> None:
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
    orders = gather_objects({part: (each.batch_size, draws_digest(each.draws, 0)) for part, each in sets.items()})
    for part in sets:
        method = LOADERS[stage][part.partition(".")[0]]
        check_same_order(f"{method} of trainer.{stage}", [each.get(part) for each in orders])


class WatchedSize(int):
    """A number of devices that records by what it divides.

    Attributes:
        quotients: the dividends and quotients.
    """

    quotients: list[tuple[Any, Any]]

    def _recorded(self, other: Any, quotient: Any) -> Any:
        self.quotients.append((other, quotient))
        return quotient

    def __rfloordiv__(self, other: Any) -> Any:
        return self._recorded(other, other // int(self))

    def __rtruediv__(self, other: Any) -> Any:
        return self._recorded(other, other / int(self))

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % int(self)

    def __mul__(self, other: Any) -> Any:
        product = int(self) * other
        return watched(product, self.quotients) if type(product) is int or isinstance(other, WatchedSize) else product

    __rmul__ = __mul__

    def __reduce__(self) -> Any:
        return int, (int(self),)


def watched(size: int, quotients: list[tuple[Any, Any]]) -> WatchedSize:
    """Return a number of devices that adds what it divides to `quotients`."""
    made = WatchedSize(size)
    made.quotients = quotients
    return made


def refuse_divided_batch_size(
    size: int | None, chosen: int | None, owner: Any, devices: int, quotients: list[tuple[Any, Any]]
) -> None:
    """Refuse a training loader whose batch size was divided by the number of devices.

    Args:
        size: the loader's batch size.
        chosen: the Trainer's `batch_size`, or None.
        owner: the user's data module or the module with the loader, or None. If it has an attribute or hyperparameter
            of a batch size that is `devices` times as large, it has divided it.
        devices: the devices of all machines.
        quotients: what was divided by the Trainer's `world_size`, `num_devices` or `num_nodes`, with the results.

    Raises:
        UserError: it was.
    """
    if size is None or size == chosen or devices == 1:
        return
    whole = next((each for each, quotient in quotients if int(quotient) == size != each), None)
    how = f"{whole} divided by the Trainer's number of devices"
    if whole is None and isinstance(owner, pl.LightningDataModule | pl.LightningModule):
        values = {**dict(owner.hparams), **vars(owner)}
        names = [name for name in values if "batch" in name and not re.search("val|test|eval|pred", name)]
        name = next((name for name in names if type(values[name]) is int and values[name] == size * devices), None)
        whole = None if name is None else values[name]
        how = f"the {name} of {type(owner).__name__}, {whole}, divided by {devices} devices"
    if whole is not None:
        raise UserError(
            f"the training loader has batch_size={size}, which is {how}: give the loader batch_size={whole}, since it "
            f"counts the samples of a step over all devices; or, if a step has {size}, Trainer(batch_size={size})"
        )


def draws_digest(draws: Draws | None, epoch: int) -> str | None:
    """Return the SHA-256 of the order that a sampler gives for an epoch, in hex; None without a sampler."""
    return None if draws is None else hashlib.sha256(draws.ids(epoch).data).hexdigest()


def check_same_order(loader: str, by_rank: list[Any]) -> None:
    """Check that the samplers of all ranks give the same order.

    Args:
        loader: what has the sampler, for messages.
        by_rank: what must be the same for each rank.
    """
    if any(each != by_rank[0] for each in by_rank):
        raise UserError(
            f"{loader}: the ranks have samplers or batches that differ: each must give the order of all samples, since "
            "Lockstep divides them: leave out what divides by rank or world size, and seed what draws"
        )


class SamplerCheck(pl.Callback):
    """Checks before each epoch that the samplers of all ranks give the same order, and that nothing changes them.

    Args:
        draws: the samples that the training sampler gives.
    """

    def __init__(self, draws: Draws) -> None:
        self.draws = draws

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        epoch = trainer.current_epoch
        self.draws.check_unchanged(epoch)
        check_same_order("the train_dataloader", gather_objects(draws_digest(self.draws, epoch)))


def sample_sets(sets: dict[str, LoaderSet]) -> SampleSets:
    """Return the data sets of a stage, and how its training samples are drawn."""
    first = [sets.get(name) or sets.get(split_of_loader(name, 0)) for name in ("train", "val", "test")]
    made = SampleSets(*(None if each is None else each.dataset for each in first))
    if train := sets.get("train"):
        made = replace(made, weights=train.weights, shuffle=train.shuffle, drop_last=train.drop_last, draws=train.draws)
        made = replace(made, most=train.most)
    return made


def in_order(each: LoaderSet) -> LoaderSet:
    """Return a set whose samples come in the order of the data set, as Lightning's `overfit_batches` changes loaders.

    As with Lightning, a SequentialSampler, also of a derived class, and a batch sampler stay.
    """
    if each.loader is not None and isinstance(each.loader.sampler, SequentialSampler):
        return each
    return replace(each, shuffle=False, weights=None, draws=None)


def first_batches(train: LoaderSet, limit: int | float, whole_batches: bool) -> LoaderSet:
    """Return a training set of which an epoch has the first batches.

    Args:
        train: the training set.
        limit: Lightning's `limit_train_batches`. With 0, nothing is trained.
        whole_batches: whether a step has several batches of the loader. `drop_last` then leaves out a short batch, and
            the last step of an epoch has those that remain.

    Raises:
        UserError: the limit is a part that is less than one batch.
    """
    if not train.batch_size or not limit or (limit == 1.0 and isinstance(limit, float) and not whole_batches):
        return train
    most = limited(train.samples, train.batch_size, limit, "limit_train_batches")
    return replace(train, most=most, drop_last=False)


class OwnedData(StepDataModule):
    """The data of one process, from a user's data module or loaders.

    It is the Trainer's `datamodule`, so attributes that a user's module reads from it are those of the user's.

    Args:
        sets: the data sets of a stage.
        owner: the user's data module, or None.
        layout: see `StepDataModule`.
        seed: see `StepDataModule`.
        rank: see `StepDataModule`.
        trains: see `StepDataModule`.
    """

    def __init__(
        self, sets: dict[str, LoaderSet], owner: Any, layout: Layout, seed: int, rank: int, trains: bool
    ) -> None:
        self.owner = owner
        self.sets = sets
        super().__init__(sample_sets(sets), layout, seed, rank, None, trains)
        if isinstance(owner, pl.LightningDataModule):
            take_identity(self, owner)

    def __getattr__(self, name: str) -> Any:
        owner = self.__dict__.get("owner")
        if owner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(owner, name)

    def evaluation_splits(self, part: str) -> list[str]:
        """Return the names of the splits that the loaders of `val` or `test` read; see `split_of_loader`."""
        return [split for split in self.sets if split.partition(".")[0] == part]

    def _dataset_of(self, split: str) -> Any:
        return self.sets[split].dataset

    def _evaluation_batch_size(self, split: str) -> int | list[int] | None:
        draws = self.sets[split].draws
        return (draws and draws.batch_sizes) or self.sets[split].batch_size

    def _evaluated(self, split: str) -> tuple[int, Ids | None]:
        draws = self.sets[split].draws
        return self.sets[split].samples, None if draws is None else draws.ids(0)

    def _processes_of(self, split: str) -> tuple[int | None, Callable[[int], None] | None]:
        each = self.sets[split]
        start = None if each.starts_worker is None else partial(_start_worker, each.starts_worker, each.loader.dataset)
        return each.num_workers, start

    # Lightning's loops call `loader_of_loop`. Users get what they gave.

    def loader_of_loop(self, name: str) -> Any:
        """Return the loader of one of Lightning's loops."""
        return getattr(super(), name)()

    def users_loader(self, name: str) -> Any:
        """Return what the user gave for the loaders that a loop reads; ours if the user gave plain data sets."""
        part = next(part for names in LOADERS.values() for part, each in names.items() if each == name)
        sets = [self.sets[split] for split in self.evaluation_splits(part)]
        return self.loader_of_loop(name) if any(each.loader is None for each in sets) or not sets else sets[0].whole

    def _of_user(self, name: str) -> Any:
        is_module = isinstance(self.owner, pl.LightningDataModule)
        return getattr(self.owner, name)() if is_module else self.users_loader(name)

    def train_dataloader(self) -> Any:
        """Return the user's loader."""
        return self._of_user("train_dataloader")

    def val_dataloader(self) -> Any:
        """Return the user's loader."""
        return self._of_user("val_dataloader")

    def test_dataloader(self) -> Any:
        """Return the user's loader."""
        return self._of_user("test_dataloader")

    def predict_dataloader(self) -> Any:
        """Return the user's loader."""
        return self._of_user("predict_dataloader")

    def _hook_owners(self) -> list[Any]:
        has_owner = isinstance(self.owner, pl.LightningDataModule)
        return [self.owner, self._module] if has_owner else [self._module]  # as Lightning chooses

    def _call(self, name: str, *args: Any) -> Any:
        """Call a method of the user's LightningDataModule, if there is one."""
        return getattr(self.owner, name)(*args) if isinstance(self.owner, pl.LightningDataModule) else None

    def teardown(self, stage: str) -> None:
        """Call the user's `teardown`."""
        self._call("teardown", stage)

    def on_exception(self, exception: BaseException) -> None:
        """Call the user's `on_exception`."""
        self._call("on_exception", exception)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's data module."""
        return self._call("state_dict") or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the user's data module."""
        self._call("load_state_dict", state_dict)


def _start_worker(start: Callable[[int], None], dataset: Any, worker: int) -> None:
    """Call a user's `worker_init_fn` in a loader process, where torch's `get_worker_info` has the user's data set."""
    object.__setattr__(get_worker_info(), "dataset", dataset)  # torch's is frozen
    start(worker)


def batch_size_of(sets: dict[str, LoaderSet], chosen: int | None, parts: Sequence[str]) -> int | None:
    """Return the batch size of the first of these parts that a loader has, or else the chosen one.

    Raises:
        UserError: the loader of `train` has another one than the Trainer's.
    """
    train = sets.get("train")
    if train and train.batch_size and chosen not in (None, train.batch_size):
        raise UserError(
            f"Trainer(batch_size={chosen}), but the training loader has batch_size={train.batch_size}: give the same; "
            "it counts the samples of one optimizer step over all devices"
        )
    of_loaders = (each.batch_size for part in parts for name, each in sets.items() if name.partition(".")[0] == part)
    return chosen or next((size for size in of_loaders if size), None)
