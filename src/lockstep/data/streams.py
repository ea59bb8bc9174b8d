"""Data sets in shards, of which a run with a window reads a few at a time."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.arithmetic.streams import ShardNeed
from lockstep.data.transforms import Transformed


class ShardedDataset(Protocol):
    """What a run with a window (`Source.window`) needs of a data set, besides its samples.

    Attributes:
        shard_borders: the samples of shard s are `shard_borders[s]` to `shard_borders[s + 1] - 1`, int64 [shards + 1].
            It rises from 0 to the number of samples. A shard may be empty.
    """

    shard_borders: NDArray[np.int64]


class ReadsAhead(Protocol):
    """A data set that fetches shards before their samples are read.

    Attributes:
        read_ahead: how many shards a list should have at least. It may change between two calls.
    """

    read_ahead: int

    def will_need(self, step: int, needs: Sequence[ShardNeed]) -> None:
        """Take note of the shards that this process reads from now on. The list replaces the one before.

        It is called before the samples of `step` are fetched, whenever a window begins. In loader processes, each of
        them calls it for its own steps. A shard that is not listed may be read all the same.

        Args:
            step: of a training set, the optimizer steps since the run began; of an evaluation, the number of the
                batch among this process's batches. The numbers in `needs` count in the same way.
            needs: the shards, in the order of their first step: those of the windows that are being read, of the next
                window of each of the process's pieces, and more until there are `read_ahead`.
        """


def reads_ahead(dataset: Any) -> ReadsAhead | None:
    """Return the data set without transforms, if it has the method of `ReadsAhead`; else None.

    A Subset has other ids than its data set, so for a Subset it is None.
    """
    while type(dataset) is Transformed:
        dataset = dataset.dataset
    return dataset if hasattr(dataset, "will_need") else None
