"""Samplers of users: the order of an epoch is what a sampler gives, the same in every process and after a resume."""

import hashlib
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities.seed import isolate_rng
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lockstep.arithmetic.order import DataOrder, hash64, order_of_uses
from lockstep.data.repeats import changed_number, numbers_of
from lockstep.data.seeding import seed_all
from lockstep.errors import UserError
from lockstep.launch.process_group import gather_objects

WITH_NUMBERS = (Tensor, np.ndarray, list, tuple, dict, set, str, int, float)
MOST_IDS = 1 << 28  # of an epoch, of a sampler that has no length


class Draws:
    """The samples that a sampler, or a batch sampler, gives for each epoch: a function of (seed, epoch).

    A copy of the sampler is iterated once for each epoch, from epoch 0 on. Before that, its `set_epoch` is called if it
    has one, and the generators of Python, numpy and torch are seeded. So a sampler with a generator or a counter of its
    own gives a resumed run the same order, too.

    Args:
        sampler: yields the numbers of samples; or lists of them.
        dataset: the data set; it is not copied.
        where: what returns the loader, `data: the train_dataloader of Digits`, for messages.
        seed: the run's seed.
        trains: whether the batches of a batch sampler must have one size, since each is an optimizer step.

    Attributes:
        samples: the number of samples of each epoch.
        batch_sizes: of a batch sampler, the number of samples of each batch; None: it yields samples.

    Raises:
        UserError: it yields something else, or its order can't be a function of the epoch.
    """

    def __init__(self, sampler: Any, dataset: Any, where: str, seed: int, trains: bool) -> None:
        self.sampler, self.dataset, self.seed = sampler, dataset, seed
        self._name = f"{where} has a {type(sampler).__name__}"
        self._first = self._copy(sampler)
        self._current, self._next = self._copy(self._first), 0
        self.batch_sizes: list[int] | None = None
        self._last: tuple[int, NDArray[np.int64]] = 0, self._drawn(0, first=True)
        self.samples = len(self._last[1])
        sizes: list[int] = self.batch_sizes or []
        if trains and (len(set(sizes[:-1])) > 1 or sizes[-1:] > sizes[:1]):
            raise UserError(
                f"{self._name} with batches of {min(sizes)} to {max(sizes)} samples: all but a shorter last one must "
                "have the same number, since each is an optimizer step"
            )

    @property
    def batch_size(self) -> int | None:
        """The samples of a batch; None: the loader decides."""
        return self.batch_sizes[0] if self.batch_sizes else None

    def ids(self, epoch: int) -> NDArray[np.int64]:
        """Return the numbers of an epoch's samples in order, int64 [samples].

        Raises:
            UserError: there are other numbers of samples than in epoch 0.
        """
        if self._last[0] != epoch:
            if epoch < self._next:
                self._current, self._next = self._copy(self._first), 0
            for number in range(self._next, epoch + 1):
                self._last = number, self._drawn(number)
        return self._last[1]

    def digest(self, epoch: int) -> str:
        """Return the SHA-256 of the order of an epoch, in hex."""
        return hashlib.sha256(self.ids(epoch).data).hexdigest()

    def check_unchanged(self, epoch: int) -> None:
        """Check that nothing has changed the user's sampler: the order of an epoch must follow from its number."""
        first = self._copy(self._first)
        for each in (self.sampler, first):
            _set_epoch(each, epoch)
        if name := changed_number(*(numbers_of(each, Sampler, WITH_NUMBERS) for each in (first, self.sampler))):
            raise UserError(
                f"{self._name} whose {name} was changed during training: a run that is resumed could not draw the same "
                "order again: let the order follow from set_epoch(epoch)"
            )

    def _drawn(self, epoch: int, first: bool = False) -> NDArray[np.int64]:
        """Iterate the sampler for the next epoch. Return the numbers of its samples."""
        sampler, key = self._current, int(hash64(self.seed, 0x5A4D, epoch))
        self._next = epoch + 1
        with isolate_rng(include_cuda=False):
            seed_all(key)
            _set_epoch(sampler, epoch)
            length = len(sampler) if hasattr(sampler, "__len__") else None
            items = list(islice(sampler, MOST_IDS if length is None else length))
        if len(items) == MOST_IDS:
            raise UserError(f"{self._name} that has no end: give it a __len__, the samples of an epoch")
        sizes = None
        if items and isinstance(items[0], list | tuple | range | np.ndarray | Tensor) and np.ndim(items[0]):
            sizes = [len(batch) for batch in items]
            items = [each for batch in items for each in batch]
        ids = np.array([self._checked(each) for each in items], dtype=np.int64)
        if first:
            self.batch_sizes = sizes
        elif len(ids) != self.samples or sizes != self.batch_sizes:
            what = "batches of other sizes" if len(ids) == self.samples else f"{len(ids)} samples"
            raise UserError(
                f"{self._name} that gives {what} in epoch {epoch}, and {self.samples} samples in epoch 0: all epochs "
                "must have the same number of samples, since the number of a step gives its epoch"
            )
        return ids

    def _checked(self, item: Any) -> int:
        number = item.item() if isinstance(item, Tensor | np.generic) and np.ndim(item) == 0 else item
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self.dataset):
            raise UserError(
                f"{self._name} that yields {item!r}: must be the number of a sample, 0 to {len(self.dataset) - 1}"
            )
        return number

    def _copy(self, sampler: Any) -> Any:
        """Return a copy of a sampler, with the same data sets."""
        shared: dict[int, Any] = {id(self.dataset): self.dataset}
        _find_shared(sampler, shared)
        memo = dict(shared)
        try:
            copied = deepcopy(sampler, memo)
        except Exception as error:
            raise UserError(
                f"{self._name} that can't be copied ({' '.join(str(error).split())}): each process must draw the same "
                "order from a copy of it"
            ) from error
        for each in memo.values():
            if isinstance(each, nn.Module | pl.Trainer):
                raise UserError(
                    f"{self._name} that refers to a {type(each).__name__}: its order must follow from the epoch, since "
                    "a run that is resumed draws it again"
                )
        return copied


@dataclass(frozen=True, eq=False)
class DrawnOrder(DataOrder):
    """The order of a training set whose sampler gives the samples of each epoch.

    Attributes:
        draws: the samples of each epoch.
    """

    draws: Draws = field(kw_only=True, repr=False)

    @property
    def samples_per_epoch(self) -> int:
        """Samples of an epoch."""
        return self.draws.samples if self.most is None else min(self.most, self.draws.samples)

    def encoded_ids(self, epoch: int) -> NDArray[np.int64]:
        """Return the samples of an epoch in order; see `DataOrder.encoded_ids`."""
        return order_of_uses(self.draws.ids(epoch), self.samples)


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
    """Checks before each epoch that nothing has changed the order of the training samples or their number.

    And that the samplers of all ranks give the same order.

    Args:
        train: the `Split` of the training set.
    """

    def __init__(self, train: Any) -> None:
        self.train = train
        self._samples = None if train.stream else len(train.dataset)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        train, epoch = self.train, trainer.current_epoch
        if self._samples not in (None, len(train.dataset)):
            raise UserError(
                f"the training set has {len(train.dataset)} samples, and had {self._samples} when fit was called: its "
                "steps are counted on, so call fit with a new lockstep.Trainer"
            )
        sampler = getattr(train.loader, "sampler", None)
        weights = sampler.weights if isinstance(sampler, WeightedRandomSampler) else train.weights
        if train.weights is not None and not np.array_equal(np.asarray(weights, np.float64), train.weights):
            raise UserError(
                "the weights of the WeightedRandomSampler were changed during training: a run that is resumed could "
                "not draw the same order again: give a sampler whose order follows from set_epoch(epoch)"
            )
        if train.draws is not None:
            train.draws.check_unchanged(epoch)
            check_same_order("the train_dataloader", gather_objects(train.draws.digest(epoch)))


def draws_itself(loader: DataLoader[Any]) -> bool:
    """Check whether a loader's order is more than a random one, or that of the data set: then its sampler is asked."""
    sampler: Any = loader.sampler
    if loader.batch_size is None:
        return True
    if type(sampler) is SequentialSampler:
        return len(sampler) != len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is RandomSampler:
        whole = len(sampler) == len(sampler.data_source) == len(loader.dataset)  # type: ignore[arg-type]
        return not whole or sampler.replacement or sampler.generator is not None
    if type(sampler) is DistributedSampler:
        return bool(sampler.seed) or len(sampler.dataset) != len(loader.dataset)  # type: ignore[arg-type]
    return True


def of_all_ranks(sampler: Any) -> Any:
    """Return a sampler of all samples for a DistributedSampler of torch; another one as it is."""
    if type(sampler) is not DistributedSampler:
        return sampler
    return DistributedSampler(sampler.dataset, 1, 0, sampler.shuffle, sampler.seed)


def _set_epoch(sampler: Any, epoch: int) -> None:
    """Call the `set_epoch` of a sampler and of those inside it, as Lightning does."""
    for each in (sampler, getattr(sampler, "sampler", None)):
        if callable(set_epoch := getattr(each, "set_epoch", None)):
            set_epoch(epoch)


def _find_shared(sampler: Any, shared: dict[int, Any]) -> None:
    """Add to `shared` what copies of a sampler refer to without a copy of it: data sets and data modules."""
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, Dataset | pl.LightningDataModule):
            shared[id(value)] = value
        elif isinstance(value, Sampler) and id(value) not in shared:
            _find_shared(value, shared)
