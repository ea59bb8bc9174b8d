"""Promise 2: one data order, a pure function of (seed, epoch, step)."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from small_data import arrays

from lockstep.arithmetic.layout import Assignment, Layout, resolve
from lockstep.arithmetic.order import DataOrder, hash64
from lockstep.data.augment import Augment
from lockstep.data.loaders import StepDataset

sizes = st.integers(1, 200)


def layout(batch_size: int, pieces: int, devices: int = 1, strategy: str = "ddp") -> Layout:
    return resolve(
        strategy=strategy, accelerator="cpu", devices=devices, num_nodes=1, batch_size=batch_size, pieces=pieces
    )


@st.composite
def orders(draw: st.DrawFn) -> DataOrder:
    pieces = draw(st.integers(1, 9))
    return DataOrder(draw(sizes), layout(pieces * draw(st.integers(1, 12)), pieces), draw(st.integers(0, 2**63)))


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


@given(orders(), st.integers(0, 3), st.integers(1, 6), st.sampled_from(["ddp", "dp"]))
def test_what_the_ranks_load_is_the_order_on_every_layout(
    order: DataOrder, epoch: int, devices: int, strategy: str
) -> None:
    """The loader's own path: each piece, as it is loaded, is the order's, and lies with the device that owns it."""
    alone = order.layout
    on = layout(alone.batch_size, alone.pieces, min(devices, alone.pieces), strategy)
    dataset = arrays(order.samples, size=2)
    order_on, assignment = replace(order, layout=on), Assignment(on)
    loaded = [StepDataset(dataset, order_on, rank, Augment(), assignment) for rank in range(on.world_size)]
    for index in range(order.steps_per_epoch):
        at_once = [each.__getitems__((epoch, index)) for each in loaded]
        pieces = {piece: ids.tolist() for piece, ids in enumerate(order.pieces(epoch, index)) if len(ids)}
        found: dict[int, list[int]] = {}
        for step_batch in at_once:
            step = epoch * order.steps_per_epoch + index
            assert (step_batch.epoch, step_batch.step) == (epoch, step)
            assert (step_batch.num_nonempty, step_batch.samples) == (len(pieces), sum(map(len, pieces.values())))
            assert step_batch.all_ranks_have_data == all(other.micro_batches for other in at_once)
            for micro_batch in step_batch.micro_batches:
                _, labels = micro_batch.batch  # which are ids here
                assert labels.tolist() == micro_batch.ids.tolist()
                assert micro_batch.piece in on.owned(micro_batch.device)
                assert micro_batch.piece not in found
                found[micro_batch.piece] = labels.tolist()
        assert found == pieces


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
