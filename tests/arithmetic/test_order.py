"""The order of the samples, a pure function of (seed, epoch, step)."""

import numpy as np
from data_orders import layout, orders
from hypothesis import given
from hypothesis import strategies as st

from lockstep.arithmetic.order import DataOrder, hash64


@given(orders(), st.integers(0, 5))
def test_an_epoch_holds_every_sample_once_in_disjoint_pieces(order: DataOrder, epoch: int) -> None:
    seen: list[int] = []
    for index in range(order.steps_per_epoch):
        step, pieces = order.step(epoch, index), order.pieces(epoch, index)
        assert np.array_equal(np.concatenate(pieces), step)
        lengths = [len(piece) for piece in pieces]
        assert len(lengths) == order.layout.pieces
        assert max(lengths) - min(lengths) <= 1
        if len(step) == order.layout.batch_size:
            assert set(lengths) == {order.layout.piece_size}
        seen += step.tolist()
    assert sorted(seen) == list(range(order.samples))


@given(orders(), st.integers(0, 400))
def test_the_position_follows_from_the_steps_taken(order: DataOrder, step: int) -> None:
    epoch, index = order.position(step)
    assert epoch * order.steps_per_epoch + index == step
    assert 0 <= index < order.steps_per_epoch


def test_seed_and_epoch_change_the_order_and_pieces_do_not() -> None:
    order = DataOrder(1000, layout(10, 1), 0).encoded_ids(0)
    assert np.array_equal(order, DataOrder(1000, layout(100, 5), 0).encoded_ids(0))
    assert not np.array_equal(order, DataOrder(1000, layout(10, 1), 0).encoded_ids(1))
    assert not np.array_equal(order, DataOrder(1000, layout(10, 1), 1).encoded_ids(0))


def test_the_order_is_the_same_in_every_release() -> None:
    assert DataOrder(10, layout(2, 1), 0).encoded_ids(0).tolist() == GOLDEN
    assert int(hash64(1, 2, 3)) == GOLDEN_HASH


GOLDEN = [8, 9, 4, 3, 0, 6, 5, 1, 2, 7]
GOLDEN_HASH = 6224725266317119511
