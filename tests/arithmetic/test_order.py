"""The order of the samples, a pure function of (seed, epoch, step)."""

import numpy as np
from data_orders import layout, orders
from hypothesis import given
from hypothesis import strategies as st

from lockstep.arithmetic.order import DataOrder, evaluation_seed, hash64, preparation_seed, training_step_seed


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


def test_the_order_by_class_and_by_weight_is_the_same_in_every_release() -> None:
    """A second use of a sample has its number plus 10."""
    balanced = DataOrder(10, layout(2, 1), 7, labels=np.array([0, 0, 0, 0, 0, 0, 1, 1, 3, 3]))
    weights = np.array([0, 1, 2, 0.5, 8, 0, 1, 1, 3, 1e-9])
    weighted = DataOrder(10, layout(2, 1), 7, weights=weights)
    assert [order.encoded_ids(epoch).tolist() for order in (balanced, weighted) for epoch in (0, 1)] == [
        [18, 1, 6, 3, 9, 5, 0, 7, 8, 16],
        [3, 7, 5, 9, 16, 2, 17, 8, 6, 18],
        [4, 14, 8, 1, 24, 34, 6, 2, 18, 44],
        [8, 4, 18, 14, 24, 28, 1, 2, 34, 44],
    ]
    assert weighted.step(0, 1).tolist() == [8, 1]


def test_each_kind_of_seed_is_the_same_in_every_release() -> None:
    assert training_step_seed(7, 3, 2) == 1529962013879009333
    assert preparation_seed(7, 3, 2) == 2594764598415686466
    assert evaluation_seed(7, 3) == 8279466631033013167


GOLDEN = [8, 9, 4, 3, 0, 6, 5, 1, 2, 7]
GOLDEN_HASH = 6224725266317119511
