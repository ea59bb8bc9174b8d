"""Iterable data sets: every process reads the whole stream, and takes the samples of its pieces by their number."""

from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.arithmetic.order import hash64
from lockstep.data.datasets import set_epoch_of
from lockstep.data.repeats import changed_number, digest_of_batch, numbers_of
from lockstep.data.seeding import Generators, seed_all
from lockstep.errors import StepRefused, UserError

COMPARED = 16  # first samples of a stream that all ranks compare
MOST = 1 << 24  # samples that are counted of a stream


class StreamSamples:
    """A map-style data set of the samples of an iterable one, by their number in the stream.

    An epoch reads a copy of the data set as it was at the start, after its `set_epoch`. Before each sample the global
    generators and those of the data set are seeded by (seed, epoch, number). So all processes, and a run that
    continues, read the same stream. Samples are read in order; one before those that are remembered is found by reading
    the stream again.

    Args:
        dataset: the iterable data set.
        where: what returns the loader, `data: the train_dataloader of Digits`, for messages.
        seed: the run's seed; 0 in an evaluation.

    Attributes:
        remembers: how many of the samples read last are remembered, for a process that takes pieces in another order.
        bound: only so many of the first samples are needed; None: all.
        cut_by_steps: whether the bound follows from the last step of the run.
    """

    def __init__(self, dataset: Any, where: str, seed: int) -> None:
        self.dataset, self._name, self._seed = dataset, f"{where} has an IterableDataset that", seed
        self.remembers = 1
        self.bound: int | None = None
        self.cut_by_steps = False
        self._epoch = 0
        self._count: int | None = None
        self._stream: Iterator[Any] | None = None
        self._remembered: dict[int, Any] = {}
        self._position = 0  # the number of the next sample of the stream
        self._copy: Any = None
        self._before: dict[str, Any] = {}  # numbers of the copy before it was read
        self._generators: Any = None

    def __len__(self) -> int:
        """The number of samples of an epoch: that of the data set's `__len__`, else they are counted once."""
        if self._count is None:
            self._count = self._counted()
        return self._count

    def __getitem__(self, number: int) -> Any:
        if number in self._remembered:
            return self._remembered[number]
        if number < self._position or self._stream is None:
            self._begin()
        with isolate_rng(include_cuda=False):
            for _ in range(self._position, number + 1):
                self._read()
        if number not in self._remembered:
            raise StepRefused(
                f"{self._name} has {self._position} samples in epoch {self._epoch}, and {len(self)} in epoch 0 or by "
                "its __len__: all epochs must have the same number, since the number of a step gives its epoch"
            )
        return self._remembered[number]

    @property
    def has_end(self) -> bool:
        """Whether the number of samples is that of an epoch, and not what a run until its last step can need."""
        return not self.cut_by_steps or len(self) != self.bound

    def set_epoch(self, epoch: int) -> None:
        """Read the stream of an epoch from now on."""
        if epoch != self._epoch:
            self._epoch, self._stream = epoch, None
            self._remembered.clear()

    def fingerprint(self) -> str:
        """Return a SHA-256 of the first samples, in hex."""
        with isolate_rng(include_cuda=False):
            one, other = (digest_of_batch([*islice(self._samples(), COMPARED)]) for _ in range(2))
        if one != other:
            raise UserError(
                f"{self._name} gives other samples when it is read again, and every process reads it by itself: draw "
                "from the global generators, which are seeded for each sample, and from no generator of its own"
            )
        self._check_unchanged()
        return one

    def _check_unchanged(self) -> None:
        """Check that reading has not changed the data set."""
        if name := changed_number(self._before, numbers_of(self._copy, Dataset, (int, float))):
            raise UserError(
                f"{self._name} changes its {name} while it is read: a run that is resumed could not read the "
                "same samples again: let them follow from set_epoch(epoch), or from random numbers, which are seeded"
            )

    def _samples(self) -> Iterator[Any]:
        """Yield the samples of the epoch from the first one on. It seeds the process's generators."""
        self._begin()
        while self._stream is not None and self._read():
            yield self._remembered[self._position - 1]
        self._stream = None

    def _begin(self) -> None:
        shared = {id(each): each for each in vars(self.dataset).values() if isinstance(each, Tensor | np.ndarray)}
        try:
            copied = deepcopy(self.dataset, dict(shared))
        except Exception as error:
            raise UserError(
                f"{self._name} can't be copied ({' '.join(str(error).split())}): each epoch reads a copy of it, so let "
                "__iter__ open what it reads"
            ) from error
        set_epoch_of(copied, self._epoch)
        self._before = numbers_of(copied, Dataset, (int, float))
        self._copy, self._generators = copied, Generators(copied)
        self._generators.search()
        self._remembered.clear()
        self._position = 0
        with isolate_rng(include_cuda=False):
            self._seed_all()
            self._stream = iter(copied)

    def _seed_all(self) -> None:
        key = int(hash64(self._seed, 0x57E4, self._epoch, self._position))
        seed_all(key)
        self._generators.seed(key)

    def _read(self) -> bool:
        """Read one sample. Return False at the end of the stream."""
        assert self._stream is not None
        self._seed_all()
        try:
            sample = next(self._stream)
        except StopIteration:
            return False
        self._remembered[self._position] = sample
        self._remembered.pop(self._position - self.remembers, None)
        self._position += 1
        return True

    def _counted(self) -> int:
        bound = MOST if self.bound is None else self.bound
        rank_zero_info(
            f"{self._name} every process reads as a whole, to take the samples of its pieces; without a __len__, it is "
            "read once more, to count them: shards are cheaper (lockstep docs shards)"
        )
        try:
            return int(min(len(self.dataset), bound))
        except (TypeError, AssertionError):  # of torch's ChainDataset
            pass
        with isolate_rng(include_cuda=False):
            count = sum(1 for _ in islice(self._samples(), bound))
        if self.bound is None and count == MOST:
            raise UserError(
                f"{self._name} has {MOST:,} samples or more, or no end: give it a __len__, the samples of an epoch, or "
                "a whole number as the Trainer's limit of batches"
            )
        self._check_unchanged()
        self._stream = None
        return count

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stream": None, "_remembered": {}, "_copy": None, "_generators": None}
