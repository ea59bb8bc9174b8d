"""Layouts: which device computes which piece, what follows from what, and the sizes that a refusal names."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.arithmetic.layout import Layout, resolve, split
from lockstep.errors import UserError

counts = st.integers(1, 12)


def make(**options: Any) -> Layout:
    usual: dict[str, Any] = {"strategy": "ddp", "accelerator": "cpu", "devices": 1, "num_nodes": 1, "batch_size": 64}
    return resolve(**(usual | options))


@given(world=counts, pieces=counts, strategy=st.sampled_from(["ddp", "dp"]))
def test_every_piece_is_computed_once(world: int, pieces: int, strategy: str) -> None:
    pieces += world
    layout = make(strategy=strategy, devices=world, pieces=pieces, batch_size=pieces)
    assigned = [pair for rank in range(layout.world_size) for pair in layout.micro_batches(rank)]
    assert sorted(piece for _, piece in assigned) == list(range(pieces))
    assert all(piece in layout.owned(device) for device, piece in assigned)
    loads = [len(layout.owned(device)) for device in range(world)]
    assert max(loads) - min(loads) <= 1
    assert layout.accumulate == max(loads)


def test_dp_assigns_pieces_in_rounds() -> None:
    layout = make(strategy="dp", devices=3, pieces=8, batch_size=8)
    assert layout.micro_batches(0) == [(0, 0), (1, 3), (2, 6), (0, 1), (1, 4), (2, 7), (0, 2), (1, 5)]


def test_pieces_and_accumulation_follow_from_each_other() -> None:
    assert make(devices=4, num_nodes=2, accumulate_grad_batches=2).pieces == 16
    assert make(devices=3, pieces=8).accumulate == 3
    assert [len(make(devices=3, pieces=8).owned(d)) for d in range(3)] == [3, 3, 2]
    assert make(devices=4, pieces=8, accumulate_grad_batches=2).pieces == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 1 << 17, "pieces": 1 << 17}, "pieces=131072 is too many: a step has at most 65,536 pieces"),
        ({"batch_size": 1 << 14, "pieces": 1 << 14, "exact": True}, "at most 8,192 pieces with exact=true"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(**options)


@given(batch=st.integers(1, 300), pieces=st.integers(1, 40))
def test_the_sizes_that_a_refusal_names_do_fit(batch: int, pieces: int) -> None:
    try:
        make(batch_size=batch, pieces=pieces)
    except UserError as refusal:
        words = str(refusal).replace(",", " ").replace(";", " ").split()
        named = [
            int(word) for word in " ".join(words).split(": ", 1)[1].replace("batch_size=", "").split() if word.isdigit()
        ]
        assert named
        for size in named:
            assert make(batch_size=size, pieces=pieces).batch_size % pieces == 0


@given(total=st.integers(1, 60), shares=st.lists(st.floats(0.05, 20), min_size=1, max_size=8))
def test_shares_are_whole_near_and_leave_nobody_out(total: int, shares: list[float]) -> None:
    total += len(shares)
    parts = split(total, len(shares), tuple(shares))
    assert sum(parts) == total
    assert min(parts) >= 1
    order = sorted(range(len(shares)), key=lambda i: shares[i])
    assert all(parts[a] <= parts[b] + 1 for a, b in itertools.pairwise(order))


@pytest.mark.parametrize(
    ("pieces", "advice"), [(24, "use batch_size=96 or 120, or pieces=25"), (51, ", or pieces=100")]
)
def test_a_refusal_names_the_next_number_of_pieces_that_fits(pieces: int, advice: str) -> None:
    with pytest.raises(UserError, match=f"{advice}$"):
        make(batch_size=100, pieces=pieces)


def test_a_description_has_the_number_of_pieces_of_each_device() -> None:
    assert make(devices=3, batch_size=8, pieces=4).describe() == "step 8 samples = 4 pieces x 2 on 3 devices, 2 + 1 + 1"
    assert make(devices=2, batch_size=8, pieces=4).describe() == "step 8 samples = 4 pieces x 2 on 2 devices, 2 each"
