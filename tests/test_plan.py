"""Promise 2: one data order, a pure function of (seed, epoch, step)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.layout import resolve
from lockstep.plan import Plan, chunks, cuts, mix, piece_seed, uniform

sizes = st.integers(1, 200)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    pieces = draw(st.integers(1, 9))
    return Plan(draw(sizes), pieces * draw(st.integers(1, 12)), pieces, draw(st.integers(0, 2**63)))


@given(plans(), st.integers(0, 5))
def test_an_epoch_holds_every_sample_once_in_disjoint_pieces(plan: Plan, epoch: int) -> None:
    seen: list[int] = []
    for index in range(plan.steps_per_epoch):
        step = plan.step(epoch, index)
        pieces = [plan.piece(epoch, index, piece) for piece in range(plan.pieces)]
        assert np.array_equal(np.concatenate(pieces), step)
        lengths = [len(piece) for piece in pieces]
        assert max(lengths) - min(lengths) <= 1
        if len(step) == plan.batch_size:
            assert set(lengths) == {plan.batch_size // plan.pieces}
        seen += step.tolist()
    assert sorted(seen) == list(range(plan.samples))


@given(plans(), st.integers(1, 6), st.integers(1, 6), st.sampled_from(["ddp", "dp"]))
def test_a_piece_holds_the_same_samples_on_every_layout(plan: Plan, few: int, many: int, strategy: str) -> None:
    dealt = []
    for world in (few, many):
        if world > plan.pieces:
            world = plan.pieces
        layout = resolve(
            strategy=strategy,
            accelerator="cpu",
            devices=world,
            num_nodes=1,
            batch_size=plan.batch_size,
            pieces=plan.pieces,
        )
        found = {
            piece: plan.piece(1, 0, piece).tolist()
            for process in range(layout.processes)
            for turn in layout.turns(process)
            for _, piece in turn
        }
        dealt.append(found)
    assert dealt[0] == dealt[1]
    assert len(dealt[0]) == plan.pieces


@given(plans(), st.integers(0, 400))
def test_the_position_follows_from_the_steps_taken(plan: Plan, step: int) -> None:
    epoch, index = plan.position(step)
    assert epoch * plan.steps_per_epoch + index == step
    assert 0 <= index < plan.steps_per_epoch
    again = Plan(plan.samples, plan.batch_size, plan.pieces, plan.seed)
    assert np.array_equal(again.step(epoch, index), plan.step(epoch, index))


def test_seed_and_epoch_change_the_order_and_pieces_do_not() -> None:
    order = Plan(1000, 10, 1, 0).order(0)
    assert np.array_equal(order, Plan(1000, 100, 5, 0).order(0))
    assert not np.array_equal(order, Plan(1000, 10, 1, 0).order(1))
    assert not np.array_equal(order, Plan(1000, 10, 1, 1).order(0))


def test_the_order_is_the_same_in_every_release() -> None:
    assert Plan(10, 2, 1, 0).order(0).tolist() == GOLDEN
    assert int(mix(1, 2, 3)) == GOLDEN_HASH


GOLDEN = [8, 9, 4, 3, 0, 6, 5, 1, 2, 7]
GOLDEN_HASH = 6224725266317119511


def test_hashes_look_uniform() -> None:
    draws = uniform(mix(7, np.arange(100_000)))
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
