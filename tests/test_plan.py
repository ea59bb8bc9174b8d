"""Promise 2: one data order, a pure function of (seed, epoch, step)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.arithmetic.layout import resolve
from lockstep.arithmetic.order import DataOrder, chunks, cuts, hash64, piece_seed, uniform

sizes = st.integers(1, 200)


@st.composite
def plans(draw: st.DrawFn) -> DataOrder:
    pieces = draw(st.integers(1, 9))
    return DataOrder(draw(sizes), pieces * draw(st.integers(1, 12)), pieces, draw(st.integers(0, 2**63)))


@given(plans(), st.integers(0, 5))
def test_an_epoch_holds_every_sample_once_in_disjoint_pieces(order: DataOrder, epoch: int) -> None:
    seen: list[int] = []
    for index in range(order.steps_per_epoch):
        step = order.step(epoch, index)
        pieces = [order.piece(epoch, index, piece) for piece in range(order.pieces)]
        assert np.array_equal(np.concatenate(pieces), step)
        lengths = [len(piece) for piece in pieces]
        assert max(lengths) - min(lengths) <= 1
        if len(step) == order.batch_size:
            assert set(lengths) == {order.batch_size // order.pieces}
        seen += step.tolist()
    assert sorted(seen) == list(range(order.samples))


@given(plans(), st.integers(1, 6), st.integers(1, 6), st.sampled_from(["ddp", "dp"]))
def test_a_piece_holds_the_same_samples_on_every_layout(order: DataOrder, few: int, many: int, strategy: str) -> None:
    dealt = []
    for world in (few, many):
        if world > order.pieces:
            world = order.pieces
        layout = resolve(
            strategy=strategy,
            accelerator="cpu",
            devices=world,
            num_nodes=1,
            batch_size=order.batch_size,
            pieces=order.pieces,
        )
        found = {
            piece: order.piece(1, 0, piece).tolist()
            for process in range(layout.world_size)
            for micro_batch in layout.micro_batches(process)
            for _, piece in micro_batch
        }
        dealt.append(found)
    assert dealt[0] == dealt[1]
    assert len(dealt[0]) == order.pieces


@given(plans(), st.integers(0, 400))
def test_the_position_follows_from_the_steps_taken(order: DataOrder, step: int) -> None:
    epoch, index = order.position(step)
    assert epoch * order.steps_per_epoch + index == step
    assert 0 <= index < order.steps_per_epoch
    again = DataOrder(order.samples, order.batch_size, order.pieces, order.seed)
    assert np.array_equal(again.step(epoch, index), order.step(epoch, index))


def test_seed_and_epoch_change_the_order_and_pieces_do_not() -> None:
    order = DataOrder(1000, 10, 1, 0).permutation(0)
    assert np.array_equal(order, DataOrder(1000, 100, 5, 0).permutation(0))
    assert not np.array_equal(order, DataOrder(1000, 10, 1, 0).permutation(1))
    assert not np.array_equal(order, DataOrder(1000, 10, 1, 1).permutation(0))


def test_the_order_is_the_same_in_every_release() -> None:
    assert DataOrder(10, 2, 1, 0).permutation(0).tolist() == GOLDEN
    assert int(hash64(1, 2, 3)) == GOLDEN_HASH


GOLDEN = [8, 9, 4, 3, 0, 6, 5, 1, 2, 7]
GOLDEN_HASH = 6224725266317119511


def test_hashes_look_uniform() -> None:
    draws = uniform(hash64(7, np.arange(100_000)))
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    assert draws.min() >= 0
    assert draws.max() < 1
    assert np.abs(counts - 5000).max() < 5 * np.sqrt(5000)
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 100))
def test_pieces_have_seeds_of_their_own(seed: int, step: int, piece: int) -> None:
    own = piece_seed(seed, step, piece)
    assert 0 <= own < 2**63
    assert own != piece_seed(seed, step, piece + 1)
    assert own != piece_seed(seed, step + 1, piece)


@given(st.integers(0, 500), st.integers(1, 40))
def test_cuts_and_chunks_cover_once(samples: int, parts: int) -> None:
    at = cuts(samples, parts)
    assert at[0] == 0
    assert at[-1] == samples
    assert at == sorted(at)
    covered = [i for start, stop in chunks(samples, parts) for i in range(start, stop)]
    assert covered == list(range(samples))
