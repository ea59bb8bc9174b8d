"""The order of shards with a window: each piece reads its own stream, a pure function of (seed, epoch, step)."""

import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from data_orders import borders, layout, stream_orders
from hypothesis import given
from hypothesis import strategies as st

from lockstep.arithmetic import streams
from lockstep.arithmetic.order import DataOrder
from lockstep.arithmetic.streams import ShardNeed, StreamOrder, shards_of_chunks

EPOCHS = st.integers(0, 5)


def order_of(sizes: list[int], batch_size: int, pieces: int, window: int, seed: int = 0) -> StreamOrder:
    on = layout(batch_size, pieces)
    return StreamOrder(sum(sizes), on, seed, shard_borders=borders(sizes), window=window)


def shards_of(order: StreamOrder, ids: np.ndarray) -> list[int]:
    return (np.searchsorted(order.shard_borders, ids, side="right") - 1).tolist()


def reads(order: StreamOrder, epoch: int, piece: int) -> list[list[int]]:
    """Return the shards that a piece reads in each step of an epoch."""
    return [shards_of(order, order.piece(epoch, step, piece)) for step in range(order.steps_per_epoch)]


@given(stream_orders(), EPOCHS)
def test_an_epoch_holds_every_sample_once_in_pieces_of_the_usual_sizes(order: StreamOrder, epoch: int) -> None:
    usual = DataOrder(order.samples, order.layout, order.seed)
    seen: list[int] = []
    for step in range(order.steps_per_epoch):
        pieces = order.pieces(epoch, step)
        assert list(map(len, pieces)) == list(map(len, usual.pieces(epoch, step))) == order.piece_sizes(step)
        assert np.array_equal(np.concatenate(pieces), order.step(epoch, step))
        seen += order.step(epoch, step).tolist()
    assert sorted(seen) == list(range(order.samples))
    assert seen == order.encoded_ids(epoch).tolist()


@given(stream_orders(), st.lists(st.tuples(EPOCHS, st.integers(0, 400)), min_size=1, max_size=5))
def test_a_step_is_the_same_wherever_a_run_begins(order: StreamOrder, places: list[tuple[int, int]]) -> None:
    """Asked in any order, of an object that has read other steps before: the pieces follow from the place alone."""
    for epoch, step in places:
        index = step % order.steps_per_epoch
        fresh = replace(order)
        for piece, ids in enumerate(order.pieces(epoch, index)):
            assert ids.tolist() == fresh.piece(epoch, index, piece).tolist()


@given(stream_orders(), EPOCHS)
def test_a_piece_reads_a_window_at_a_time_and_few_shards_are_read_twice(order: StreamOrder, epoch: int) -> None:
    readers: Counter[int] = Counter()
    for piece in range(order.layout.pieces):
        read = [shard for step in reads(order, epoch, piece) for shard in step]
        readers.update(set(read))
        first = {shard: place for place, shard in reversed([*enumerate(read)])}
        last = {shard: place for place, shard in enumerate(read)}
        for place in range(len(read)):
            assert sum(first[shard] <= place <= last[shard] for shard in first) <= order.window
    assert sum(readers.values()) <= int((np.diff(order.shard_borders) > 0).sum()) + order.layout.pieces - 1


@given(stream_orders(), EPOCHS)
def test_one_piece_with_all_shards_in_its_window_has_the_order_of_a_folder(order: StreamOrder, epoch: int) -> None:
    whole = replace(order, layout=layout(order.layout.batch_size, 1), window=len(order.shard_borders))
    usual = DataOrder(order.samples, whole.layout, order.seed)
    assert whole.encoded_ids(epoch).tolist() == usual.encoded_ids(epoch).tolist()


def test_two_pieces_read_the_shard_between_them_at_the_same_time() -> None:
    """So that a machine which computes both fetches it once."""
    order = order_of([100] * 23, batch_size=40, pieces=4, window=2)
    for epoch in range(5):
        by_piece = [reads(order, epoch, piece) for piece in range(4)]
        for one, other in pairwise(by_piece):
            (shared,) = {shard for step in one for shard in step} & {shard for step in other for shard in step}
            steps = [[step for step, shards in enumerate(each) if shared in shards] for each in (one, other)]
            assert max(each[0] for each in steps) <= min(each[-1] for each in steps)  # they overlap


def test_windows_are_of_one_size() -> None:
    """A stream of 9 shards with a window of 4 is read as 3, 3 and 3, not as 4, 4 and 1, which would mix nothing."""
    shards = reads(order_of([10] * 9, batch_size=30, pieces=1, window=4), 0, 0)
    assert [len(set(step)) for step in shards] == [3, 3, 3]


def test_seed_and_epoch_change_the_order() -> None:
    first = order_of([7, 9, 11, 3] * 5, 12, 3, 2)
    orders = [first.encoded_ids(0), first.encoded_ids(1), replace(first, seed=1).encoded_ids(0)]
    orders.append(replace(first, window=3).encoded_ids(0))
    assert len({tuple(order.tolist()) for order in orders}) == len(orders)
    assert first.encoded_ids(0).tolist() != list(range(first.samples))


def test_the_order_is_the_same_in_every_release() -> None:
    order = order_of([3, 5, 2, 4, 0, 2], batch_size=6, pieces=2, window=2, seed=7)
    places = (0, 0), (0, 2), (3, 1)
    assert [[piece.tolist() for piece in order.pieces(*place)] for place in places] == [
        [[8, 9, 3], [13, 10, 11]],
        [[4, 2], [6, 7]],
        [[14, 1, 3], [13, 12, 11]],
    ]


@given(stream_orders(), EPOCHS, st.integers(0, 400), st.integers(0, 9), st.integers(1, 9))
def test_the_shards_ahead_are_those_that_the_next_steps_read(
    order: StreamOrder, epoch: int, step: int, count: int, of: int
) -> None:
    """Compared with what the pieces of some process read, step by step, from there to the end of the next epoch."""
    index, per_epoch = step % order.steps_per_epoch, order.steps_per_epoch
    pieces = list(range(0, order.layout.pieces, of))
    needs, due = order.shards_ahead(epoch, index, pieces, count)
    now = epoch * per_epoch + index
    read: dict[int, set[int]] = {}  # by step
    for at in range(now, (epoch + 2) * per_epoch):
        ids = [order.piece(*divmod(at, per_epoch), piece) for piece in pieces]
        read[at] = set(shards_of(order, np.concatenate(ids)))
    assert [need.first_step for need in needs] == sorted(need.first_step for need in needs)
    if set().union(*read.values()):
        end = max((need.first_step for need in needs), default=now)
        for at in range(now, min(max(due, end), max(read) + 1)):  # until the next list, and as far as this one reaches
            assert read[at] <= {need.shard for need in needs if need.first_step <= at <= need.last_step}
    for one, other in ((one, other) for number, one in enumerate(needs) for other in needs[:number]):
        assert one.shard != other.shard or one.first_step > other.last_step + 1
    for need in (need for need in needs if need.first_step > now):  # a window that is read may be done with a shard
        assert any(need.shard in read[at] for at in range(need.first_step, need.last_step + 1))
    assert all(need.last_step >= now for need in needs), "none has been done with"
    everything = order.shards_ahead(epoch, index, pieces, 10**6)[0]
    assert len(needs) >= min(count, len(everything))
    assert now < due


def test_the_next_window_is_listed_however_few_shards_are_wanted() -> None:
    order = order_of([10] * 12, batch_size=10, pieces=1, window=2)
    assert {need.first_step for need in order.shards_ahead(0, 0, [0], 0)[0]} == {0, 2}


def test_no_shard_is_listed_for_steps_after_the_end_of_the_run() -> None:
    order = order_of([10] * 12, batch_size=10, pieces=1, window=2)
    assert {need.first_step for need in order.shards_ahead(0, 8, [0], 99)[0]} == {8, *range(10, 24, 2)}
    assert {need.first_step for need in order.shards_ahead(0, 8, [0], 99, stop_step=12)[0]} == {8, 10}


def test_an_evaluation_reads_shards_in_order() -> None:
    sizes, chunks = [10, 0, 25, 5], [(0, 8), (8, 16), (16, 24), (24, 32), (32, 40)]
    needs = [ShardNeed(0, 0, 1), ShardNeed(2, 1, 4), ShardNeed(3, 4, 4)]
    assert shards_of_chunks(borders(sizes), chunks, 0, 9) == needs
    assert shards_of_chunks(borders(sizes), chunks, 2, 0) == [ShardNeed(2, 2, 3)]
    assert shards_of_chunks(borders(sizes), [], 0, 9) == []


@pytest.mark.parametrize("shards", [1_000, 100_000])
def test_a_start_in_a_large_set_computes_windows_only(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred million samples: the numbers that are hashed are those of the shards and of some windows."""
    hashed: list[int] = []

    def counted(*keys: Any) -> Any:
        hashed.append(sum(each.size for each in keys if isinstance(each, np.ndarray)))
        return hash64(*keys)

    hash64 = streams.hash64
    monkeypatch.setattr(streams, "hash64", counted)
    order = order_of([1_000] * shards, batch_size=256, pieces=8, window=4)
    tracemalloc.start()
    try:
        epoch, index = order.position(order.steps_per_epoch * 5 // 2)  # in the middle of the third epoch
        assert sum(map(len, order.pieces(epoch, index))) == 256
        order.shards_ahead(epoch, index, range(8), 64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(hashed) <= 2 * shards + 8 * 4_000
    assert peak < 200 * shards + 4_000_000  # bytes; the ids of all samples would take 8,000 a shard
