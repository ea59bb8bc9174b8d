"""How large the steps of a `lockstep.Trainer` are, by the user's loaders and the Trainer's options."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import SequentialSampler

from lockstep.data.loaders import limited
from lockstep.data.splits import Split
from lockstep.errors import UserError


class Quotient(int):
    """A whole number divided by a number of devices, without a remainder.

    Attributes:
        whole: that number.
    """

    whole: int

    def __floordiv__(self, other: Any) -> Any:
        return other.__rfloordiv__(self)  # which may be a `WatchedSize`

    def __reduce__(self) -> Any:
        return int, (int(self),)


class WatchedSize(int):
    """A number of devices that records by what it divides. `32 // size` is a `Quotient`.

    Attributes:
        quotients: the other dividends and quotients.
    """

    quotients: list[tuple[Any, Any]]

    def _recorded(self, other: Any, quotient: Any) -> Any:
        self.quotients.append((other, quotient))
        return quotient

    def __rfloordiv__(self, other: Any) -> Any:
        if type(other) not in (int, Quotient) or other % int(self):
            return self._recorded(other, other // int(self))
        if self == 1:  # of several devices in one process, too
            return other
        quotient = Quotient(int(other) // int(self))
        quotient.whole = getattr(other, "whole", other)
        return quotient

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


def over_all_devices(
    splits: dict[str, Split], chosen: int | None, devices: int, owner: Any, quotients: list[tuple[Any, Any]]
) -> dict[str, Split]:
    """Return a user's data sets with batch sizes that count the samples of all devices.

    A loader whose batch size is a `Quotient` has that of one device. So may the training loader beside a `batch_size`
    of the Trainer that is a multiple of its own.

    Args:
        splits: the data sets.
        chosen: the Trainer's `batch_size`, or None.
        devices: the devices of all machines.
        owner: the user's data module or the module with the loaders, or None.
        quotients: what else was divided by the Trainer's `world_size`, `num_devices` or `num_nodes`, with the results.
    """
    made = {}
    for part, each in splits.items():
        size = each.batch_size
        if part == "train" and chosen and size:
            if chosen % size:
                raise UserError(
                    f"Trainer(batch_size={chosen}), but the training loader has batch_size={size}: give the same, or "
                    "a multiple; it counts the samples of one optimizer step over all devices"
                )
            size = chosen
        elif isinstance(size, Quotient) and size.whole == size * devices:
            size = size.whole
            if part == "train" and devices > 1:
                rank_zero_info(
                    f"a step has {size} samples, since the training loader has batch_size={each.batch_size}, which is "
                    f"{size} divided by the Trainer's number of devices"
                )
        elif part == "train" and size and devices > 1:
            _refuse_divided(size, owner, devices, quotients)
        made[part] = replace(each, batch_size=size)
    return made


def _refuse_divided(size: int, owner: Any, devices: int, quotients: list[tuple[Any, Any]]) -> None:
    """Refuse a batch size of a training loader that was divided by the number of devices; see `over_all_devices`.

    The owner may have an attribute or hyperparameter of a batch size that is `devices` times as large.
    """
    whole = getattr(size, "whole", None)
    whole = whole or next((each for each, quotient in quotients if int(quotient) == size != each), None)
    how = f"{whole} divided by the Trainer's number of devices"
    if whole is None and isinstance(owner, pl.LightningDataModule | pl.LightningModule):
        values = {**dict(owner.hparams), **vars(owner)}
        names = [name for name in values if "batch" in name and not re.search("val|test|eval|pred", name)]
        name = next((name for name in names if type(values[name]) is int and values[name] == size * devices), None)
        whole = None if name is None else values[name]
        how = f"the {name} of {type(owner).__name__}, {whole}, divided by {devices} devices"
    if whole is not None:
        raise UserError(
            f"the training loader has batch_size={size}, which is {how}: give Trainer(batch_size={whole}), which "
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
    """Return the batch size of the first of these parts that a loader has, or else the chosen one."""
    of_loaders = (each.batch_size for part in parts for name, each in splits.items() if name.partition(".")[0] == part)
    return chosen or next((size for size in of_loaders if size), None)
