"""The order of data in shards with a window: each piece of a step reads a stream of its own, without state.

An epoch puts the shards in a row, by a keyed permutation, and cuts the row of their samples into as many streams as a
step has pieces. The lengths of the streams are what the pieces of all steps need, so all streams end together, whatever
the sizes of the shards are. A cut may lie inside a shard, which two pieces then read: there are `pieces - 1` cuts, so
an epoch reads at most `shards + pieces - 1` parts of shards. Pieces with odd numbers read their stream backwards, so
the two pieces at a cut read the shard there at the same time: both first or both last.

A piece reads its stream in windows of at most `window` shards, and draws the samples of a window by a keyed
permutation. So the samples of a piece follow from (seed, epoch, step), the borders of the shards and the window.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import merge
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.arithmetic.order import DataOrder, border, cuts, hash64

Ids = NDArray[np.int64]


class ShardNeed(NamedTuple):
    """A shard, and the first and the last step that read it. Steps are counted since the run began, 0-based."""

    shard: int
    first_step: int
    last_step: int


class Stream(NamedTuple):
    """What a piece reads in an epoch: parts of shards, in order.

    Attributes:
        shards: the shard of each part, int64 [parts].
        starts: the first sample of each part, int64 [parts]; `stops`: the one after its last.
        first_parts: the first part of each window, and at the end the number of parts, int64 [windows + 1].
        ends: how many samples of the stream lie before each window, and at the end all, int64 [windows + 1].
    """

    shards: Ids
    starts: Ids
    stops: Ids
    first_parts: Ids
    ends: Ids


@dataclass(frozen=True, eq=False)
class StreamOrder(DataOrder):
    """The order of a training set in shards of which each piece reads `window` at a time.

    Attributes:
        shard_borders: the samples of shard s are `shard_borders[s]` to `shard_borders[s + 1] - 1`, int64 [shards + 1].
        window: shards from which a piece draws samples at a time. With fewer shards than that in a stream, the piece
            draws from all of them.
    """

    shard_borders: Ids = field(kw_only=True, repr=False)
    window: int = field(kw_only=True)
    # The window that each piece read last: (epoch, number of the window) and its samples in order.
    _windows: dict[int, tuple[tuple[int, int], Ids]] = field(init=False, repr=False, default_factory=dict)

    def encoded_ids(self, epoch: int) -> Ids:
        """Return the samples of an epoch in order, int64 [samples]. Each is used once, so the elements are the ids."""
        return np.concatenate([self.step(epoch, index) for index in range(-(-self.samples // self.layout.batch_size))])

    def step(self, epoch: int, index: int) -> Ids:
        """Return the sample ids of step `index` of an epoch, in order."""
        return np.concatenate(self.pieces(epoch, index))

    def piece(self, epoch: int, index: int, piece: int) -> Ids:
        """Return the sample ids of a piece of step `index`. Only the windows that it reads are computed."""
        size, pieces = self.step_size(index), self.layout.pieces
        start = index * self._samples_per_step(piece)
        stop = start + border(size, pieces, piece + 1) - border(size, pieces, piece)
        if start == stop:
            return np.empty(0, dtype=np.int64)
        ends = _stream(self, epoch, piece).ends
        first, last = (int(number) for number in np.searchsorted(ends, (start, stop - 1), side="right") - 1)
        parts = [
            self._window(epoch, piece, number)[max(start - ends[number], 0) : stop - ends[number]]
            for number in range(first, last + 1)
        ]
        return np.concatenate(parts)

    def shards_ahead(
        self, epoch: int, index: int, pieces: Sequence[int], count: int, stop_step: int | None = None
    ) -> tuple[list[ShardNeed], int]:
        """Return the shards that some pieces read from step `index` of an epoch on.

        Args:
            epoch: 0-based.
            index: the number of the step in its epoch.
            pieces: numbers of the pieces.
            count: how many shards to list, if so many are read until the end of the next epoch.
            stop_step: the number of steps of the run; None: unknown.

        Returns:
            The shards in the order of their first step: those of the window that each piece reads, of its next window,
            and of more windows until there are `count`. A shard occurs twice if it is read, then not, then again.
            And the first later step at which a piece begins a window: a new list is due there.
        """
        now = epoch * self.steps_per_epoch + index
        windows = merge(*(self._windows_ahead(epoch, index, piece) for piece in pieces))
        listed = dict.fromkeys(pieces, 0)  # windows of each piece
        needs: list[ShardNeed] = []
        last_need: dict[int, int] = {}  # by shard: its index in `needs`
        due = now + 2 * self.steps_per_epoch
        for first_step, piece, last_step, shards in windows:
            if stop_step is not None and first_step >= stop_step:
                break
            if first_step > now:
                due = min(due, first_step)
                if len(needs) >= count and min(listed.values()) >= 2:
                    break
            listed[piece] += 1
            for shard in shards:
                before = last_need.get(shard)
                if before is not None and needs[before].last_step + 1 >= first_step:
                    last = max(needs[before].last_step, last_step)
                    needs[before] = needs[before]._replace(last_step=last)
                else:
                    last_need[shard] = len(needs)
                    needs.append(ShardNeed(shard, max(first_step, now), last_step))
        return needs, due

    def _samples_per_step(self, piece: int) -> int:
        """Return the samples of a piece in a step that is not short."""
        size, pieces = self.layout.batch_size, self.layout.pieces
        return border(size, pieces, piece + 1) - border(size, pieces, piece)

    def _window(self, epoch: int, piece: int, number: int) -> Ids:
        """Return the samples of a window in the order in which its piece draws them."""
        key, samples = self._windows.get(piece, (None, None))
        if key == (epoch, number) and samples is not None:
            return samples
        stream = _stream(self, epoch, piece)
        parts = slice(stream.first_parts[number], stream.first_parts[number + 1])
        ids = np.concatenate([np.arange(*part) for part in zip(stream.starts[parts], stream.stops[parts], strict=True)])
        # The keys of the permutation of the whole set: one piece with all shards in its window has its order.
        samples = ids[np.argsort(hash64(self.seed, 0x04DE4, epoch, ids), kind="stable")]
        self._windows[piece] = (epoch, number), samples
        return samples

    def _windows_ahead(self, epoch: int, index: int, piece: int) -> Iterator[tuple[int, int, int, list[int]]]:
        """Yield `(first step, piece, last step, shards)` of the windows of a piece until the end of the next epoch."""
        per_step, full_steps = self._samples_per_step(piece), self.samples // self.layout.batch_size
        for each, start in ((epoch, index * per_step), (epoch + 1, 0)):
            stream, offset = _stream(self, each, piece), each * self.steps_per_epoch
            read = full_steps * per_step if self.drop_last else int(stream.ends[-1])  # samples of the stream
            for number in range(int(np.searchsorted(stream.ends, start, side="right")) - 1, len(stream.ends) - 1):
                ends = int(stream.ends[number]), min(int(stream.ends[number + 1]), read)
                if ends[0] < ends[1]:
                    steps = [
                        min(at // per_step, full_steps) if per_step else full_steps for at in (ends[0], ends[1] - 1)
                    ]
                    parts = slice(stream.first_parts[number], stream.first_parts[number + 1])
                    yield offset + steps[0], piece, offset + steps[1], stream.shards[parts].tolist()


def shards_of_chunks(shard_borders: Ids, chunks: Sequence[tuple[int, int]], number: int, count: int) -> list[ShardNeed]:
    """Return the shards that an evaluation reads from a chunk on, in order. Its steps are the numbers of the chunks.

    Args:
        shard_borders: see `StreamOrder`.
        chunks: `(start, stop)` of each chunk of a process.
        number: of the chunk.
        count: how many shards to list, if so many are read. Those of this chunk and the next one are always listed.
    """
    needs: list[ShardNeed] = []
    for step in range(number, len(chunks)):
        if step > number + 1 and len(needs) >= count:
            break
        start, stop = chunks[step]
        first, end = int(np.searchsorted(shard_borders, start, "right")) - 1, int(np.searchsorted(shard_borders, stop))
        for shard in first + np.flatnonzero(np.diff(shard_borders[first : end + 1])):
            if needs and needs[-1].shard == shard:
                needs[-1] = needs[-1]._replace(last_step=step)
            else:
                needs.append(ShardNeed(int(shard), step, step))
    return needs


@lru_cache(maxsize=2)
def _row(order: StreamOrder, epoch: int) -> tuple[Ids, Ids]:
    """Return the shards of an epoch in a row, int64 [n], and how many samples lie before each and in all, [n + 1]."""
    sizes = np.diff(order.shard_borders)
    shards = np.flatnonzero(sizes)
    shards = shards[np.argsort(hash64(order.seed, 0x5A4D, epoch, shards), kind="stable")]
    return shards, np.concatenate([[0], np.cumsum(sizes[shards])])


@lru_cache(maxsize=1024)
def _stream(order: StreamOrder, epoch: int, piece: int) -> Stream:
    """Return the stream of a piece."""
    shards, before = _row(order, epoch)
    layout, (full_steps, tail) = order.layout, divmod(order.samples, order.layout.batch_size)
    start, stop = (
        full_steps * border(layout.batch_size, layout.pieces, number) + border(tail, layout.pieces, number)
        for number in (piece, piece + 1)
    )
    first = int(np.searchsorted(before, start, side="right")) - 1
    last = max(int(np.searchsorted(before, stop, side="left")), first)  # the one after the last
    read = shards[first:last]
    starts, stops = np.maximum(before[first:last], start), np.minimum(before[first + 1 : last + 1], stop)
    offset = order.shard_borders[read] - before[first:last]  # from a place in the row to an id
    step = -1 if piece % 2 else 1
    read, starts, stops = (each[::step] for each in (read, starts + offset, stops + offset))
    first_parts = np.array(cuts(len(read), max(1, -(-len(read) // order.window))))
    ends = np.concatenate([[0], np.cumsum(stops - starts)])[first_parts]
    return Stream(read, starts, stops, first_parts, ends)
