"""How large the steps of a `lockstep.Trainer` are, by the user's loaders and the Trainer's options."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import SequentialSampler

from lockstep.data.loaders import limited
from lockstep.data.splits import Split
from lockstep.errors import UserError


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


def in_order(each: Split) -> Split:
    """Return a split whose samples come in the order of the data set, as Lightning's `overfit_batches` changes loaders.

    As with Lightning, a SequentialSampler, also of a derived class, and a batch sampler stay.
    """
    if each.loader is not None and isinstance(each.loader.sampler, SequentialSampler):
        return each
    return replace(each, shuffle=False, weights=None, draws=None)


def first_batches(train: Split, limit: int | float, whole_batches: bool) -> Split:
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


def batch_size_of(splits: dict[str, Split], chosen: int | None, parts: Sequence[str]) -> int | None:
    """Return the batch size of the first of these parts that a loader has, or else the chosen one.

    Raises:
        UserError: the loader of `train` has another one than the Trainer's.
    """
    train = splits.get("train")
    if train and train.batch_size and chosen not in (None, train.batch_size):
        raise UserError(
            f"Trainer(batch_size={chosen}), but the training loader has batch_size={train.batch_size}: give the same; "
            "it counts the samples of one optimizer step over all devices"
        )
    of_loaders = (each.batch_size for part in parts for name, each in splits.items() if name.partition(".")[0] == part)
    return chosen or next((size for size in of_loaders if size), None)
