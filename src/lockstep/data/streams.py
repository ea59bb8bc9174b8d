"""Data sets in shards, of which a run with a window reads a few at a time."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.arithmetic.layout import Layout
from lockstep.arithmetic.streams import ShardNeed
from lockstep.data.datasets import Ids, Wrapper, innermost_dataset, weights_of
from lockstep.data.splits import Source, Splits
from lockstep.errors import UserError


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
    dataset = dataset.dataset if isinstance(dataset, Wrapper) else dataset
    return dataset if hasattr(dataset, "will_need") else None


def fetch_counts(dataset: Any) -> Mapping[str, int] | None:
    """Return what a data set has fetched for this rank since it was opened, if its method `fetch_counts` says so.

    The numbers are `bytes`; `hits`, how often a shard was there when it was read first; and `waits`, how often not.
    """
    dataset = innermost_dataset(dataset, in_wrappers=True)
    counts: Mapping[str, int] | None = dataset.fetch_counts() if hasattr(dataset, "fetch_counts") else None
    return counts


def room_note(splits: Splits, layout: Layout) -> str:
    """Return a line if a machine has too little room for the shards that its pieces read; an empty text if it has.

    A data set states that by its method `room_note`, which gets the number of pieces of a machine and the window.
    """
    train = innermost_dataset(splits.train, in_wrappers=True)
    if splits.window is None or not hasattr(train, "room_note"):
        return ""
    counts, devices = layout.counts, layout.devices
    pieces = max(sum(counts[first : first + devices]) for first in range(0, len(counts), devices))
    return str(train.room_note(min(pieces, layout.pieces), splits.window))


def checked_borders(source: Source, options: Mapping[str, Any]) -> Ids:
    """Return the borders of the shards of a training set that is read with a window, int64 [shards + 1].

    Args:
        source: it has a window.
        options: `sampling`, `folds` and `val_fraction` of the `data` group.
    """
    window, train = source.window, source.train
    if type(window) is not int or window < 1:
        raise UserError(f"data.window={window}: must be a whole number of shards of at least 1, or null")
    try:
        borders = np.asarray(train.shard_borders)
    except AttributeError:
        name = type(train).__name__
        raise UserError(
            f"data.window={window}: the training set, a {name}, has no shard_borders: leave it out"
        ) from None
    integers = borders.dtype.kind in "iu" and borders.ndim == 1 and len(borders) > 1
    if not integers or borders[0] != 0 or borders[-1] != len(train) or (np.diff(borders.astype(np.int64)) < 0).any():
        raise UserError(
            f"data.window={window}: the shard_borders of the training set must be whole numbers that rise from 0 to "
            f"{len(train)}, its samples"
        )
    if options.get("sampling") is not None:
        other = f"data.sampling={options['sampling']}"
        raise UserError(f"data.window={window}: {other} draws from all shards at once: leave one of the two out")
    if source.sample_weights is not None or weights_of(train) is not None:
        what = "the data has sample_weights, which draw from all shards at once"
        raise UserError(f"data.window={window}: {what}: leave one of the two out")
    if options.get("folds") is not None:
        folds = f"data.folds={options['folds']} takes images out of all shards"
        raise UserError(f"data.window={window}: {folds}: leave one of the two out")
    if source.val is None and options.get("val_fraction"):
        taken = f"data.val_fraction={options['val_fraction']:g} would take images out of all shards"
        raise UserError(f"data.window={window}: {taken}: make shards for a part val, or use data.val_fraction=0")
    return borders.astype(np.int64)
