"""The data of a `lockstep.Trainer`: plain data sets, DataLoaders or a LightningDataModule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import IterableDataset

from lockstep.arithmetic.layout import Layout
from lockstep.data.data_module import StepDataModule
from lockstep.data.datasets import SampleSets, checked_weights, content_of, fingerprint
from lockstep.data.loader_sets import LoaderSet, refuse_transfers, set_of_loader
from lockstep.errors import UserError
from lockstep.launch.environment import environment
from lockstep.launch.process_group import gather_objects
from lockstep.step.passes import overrides_method

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
    """

    owner: Any
    loaders: dict[str, Any]

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
        if isinstance(self.owner, pl.LightningDataModule):
            sets = _sets_of_module(self.owner, trainer, stage, seed)
        elif isinstance(self.owner, DataModule):
            sets = {part: self.owner.set_of(method) for part, method in LOADERS[stage].items()}
        else:
            sets = {
                part: set_of_loader(
                    self.loaders.get(method),
                    f"data: the {method} of trainer.{stage}",
                    method == "train_dataloader",
                    "a WeightedRandomSampler",
                )
                for part, method in LOADERS[stage].items()
            }
        present = {part: each for part, each in sets.items() if each is not None}
        for part in [name for name in LOADERS[stage] if name != "val" or stage == "validate"]:
            if part not in present:
                raise UserError(f"trainer.{stage}: there is no {LOADERS[stage][part]}: give its data set or loader")
        for part, each in present.items():
            if not len(each.dataset):
                raise UserError(f"trainer.{stage}: the data set of {LOADERS[stage][part]} is empty: give it samples")
        _check_same_on_all_ranks(stage, present)
        return present


def user_data(stage: str, first: Any, val_loaders: Any, datamodule: Any) -> UserData | None:
    """Return what a user gave a method of the Trainer; None if nothing.

    Args:
        stage: `fit`, `validate`, `test` or `predict`.
        first: the loaders of the method, or, as Lightning allows, a data module.
        val_loaders: of `fit`: the loaders for validation.
        datamodule: a data module.

    Raises:
        UserError: there are both, or the data module is none.
    """
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
        return UserData(datamodule, {})
    if first is None and val_loaders is None:
        return None
    return UserData(None, dict(zip(LOADERS[stage].values(), (first, val_loaders), strict=False)))


def _sets_of_module(
    module: pl.LightningDataModule, trainer: pl.Trainer, stage: str, seed: int
) -> dict[str, LoaderSet | None]:
    """Return the data sets of a LightningDataModule, after `prepare_data` and `setup`."""
    refuse_transfers(module)
    module.trainer = trainer
    with isolate_rng(include_cuda=False):
        pl.seed_everything(seed, workers=False, verbose=False)
        here = environment()
        if (here.local_rank if module.prepare_data_per_node else here.rank) == 0:
            module.prepare_data()
        gather_objects(None)  # wait until the data are prepared
        pl.seed_everything(seed, workers=False, verbose=False)
        module.setup(stage)
        return {part: _set_of_method(module, method) for part, method in LOADERS[stage].items()}


def _set_of_method(module: pl.LightningDataModule, method: str) -> LoaderSet | None:
    """Return the data set of the loader that a method of a LightningDataModule returns."""
    loader = getattr(module, method)() if overrides_method(module, method, pl.LightningDataModule) else None
    where, trains = f"data: the {method} of {type(module).__name__}", method == "train_dataloader"
    return set_of_loader(loader, where, trains, "a WeightedRandomSampler")


def _check_same_on_all_ranks(stage: str, sets: dict[str, LoaderSet]) -> None:
    """Check that all ranks have data sets of the same sizes, with the same parts of a `Subset`."""
    local = {part: (len(each.dataset), fingerprint(each.dataset)) for part, each in sets.items()}
    contents = {part: content_of([each.dataset]) for part, each in sets.items()}
    by_rank = gather_objects((local, contents))
    # Of a folder the content is unknown. All ranks compare the known ones, so that all raise the error.
    known = [{its.get(part) for _, its in by_rank} - {None} for part in sets]
    if any(each != local for each, _ in by_rank) or any(len(each) > 1 for each in known):
        raise UserError(
            f"trainer.{stage}: the ranks have different data sets: each must have all samples, since Lockstep "
            "divides them"
        )


def sample_sets(sets: dict[str, LoaderSet]) -> SampleSets:
    """Return the data sets of a stage, and how its training samples are drawn."""
    parts = [sets[name].dataset if name in sets else None for name in ("train", "val", "test")]
    made = SampleSets(*parts)
    if train := sets.get("train"):
        made = replace(made, weights=train.weights, shuffle=train.shuffle, drop_last=train.drop_last)
    return made


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
        workers = max(each.num_workers for each in sets.values())
        super().__init__(sample_sets(sets), layout, seed, rank, workers, trains)
        self.batch_sizes = {part: each.batch_size for part, each in sets.items() if each.batch_size}

    def __getattr__(self, name: str) -> Any:
        owner = self.__dict__.get("owner")
        if owner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(owner, name)

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
    of_loaders = (sets[part].batch_size for part in parts if part in sets)
    return chosen or next((size for size in of_loaders if size), None)
