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
    layout = make(strategy="dp", one_process=True, devices=3, pieces=8, batch_size=8)
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
        (
            {"batch_size": 1 << 14, "pieces": 1 << 14, "exact": True},
            "pieces=16384 is too many: a step has at most 8,192 pieces with exact=true",
        ),
        (
            {"batch_size": 1 << 17, "devices": 2, "accumulate_grad_batches": 1 << 16},
            "2 devices x 65536 accumulated is too many: a step has at most 65,536 pieces",
        ),
        (
            {"devices": 3, "accumulate_grad_batches": 2},
            "batch_size=64 can't be cut into 6 equal pieces (3 devices x 2 accumulated): use batch_size=60 or 66, or "
            "pieces=8",
        ),
        (
            {"batch_size": 3, "devices": 4},
            "batch_size=3 can't be cut into 4 equal pieces (4 devices x 1 accumulated): use batch_size=4",
        ),
        (
            {"batch_size": 4, "pieces": 5, "devices": 4},
            "batch_size=4 can't be cut into 5 equal pieces (pieces=5): use batch_size=5, or pieces=4",
        ),
        (
            {"batch_size": 8209, "pieces": 2, "exact": True},  # a prime number
            "batch_size=8209 can't be cut into 2 equal pieces (pieces=2): use batch_size=8208 or 8210",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        make(**options)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 1 << 16, "pieces": 1 << 16},
        {"batch_size": 1 << 13, "pieces": 1 << 13, "exact": True},
        {"devices": 2, "num_nodes": 2, "pieces": 4},
        {"devices": 3, "pieces": 8, "accumulate_grad_batches": 4, "shares": (1.0, 1.0, 2.0)},
        {"pieces": 7, "equal_pieces": False},
    ],
)
def test_the_largest_and_smallest_numbers_that_fit(options: dict[str, int]) -> None:
    layout = make(**options)
    assert sum(layout.counts) == layout.pieces == options["pieces"]
    assert min(layout.counts) >= 1


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
        assert all(named), "no batch of 0 samples"
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
    ("options", "line"),
    [
        ({"devices": 3, "batch_size": 8, "pieces": 4}, "step 8 samples = 4 pieces x 2 on 3 devices, 2 + 1 + 1"),
        ({"devices": 2, "batch_size": 8, "pieces": 4}, "step 8 samples = 4 pieces x 2 on 2 devices, 2 each"),
        ({"batch_size": 1}, "step 1 sample = 1 piece x 1 on 1 device"),
        ({"batch_size": 9, "pieces": 4, "equal_pieces": False}, "step 9 samples = 4 pieces x 2 or 3 on 1 device"),
        ({"devices": 2, "num_nodes": 3}, "step 60 samples = 6 pieces x 10 on 6 devices, 1 each of 3 nodes"),
        (
            {"strategy": "stages", "devices": 2, "weights": "staged", "pieces": 4},
            "step 60 samples = 4 pieces x 15 on 2 stages (20% idle)",
        ),
    ],
)
def test_a_description_has_the_number_of_pieces_of_each_device(options: dict[str, Any], line: str) -> None:
    assert make(**{"batch_size": 60, **options}).describe() == line


def test_shares_are_rounded_by_the_largest_remainder() -> None:
    assert split(8, 3) == [3, 3, 2]
    assert split(10, 3, (1.0, 2.0, 2.0)) == [2, 4, 4]
    assert split(10, 3, (3.0, 1.0, 1.0)) == [6, 2, 2]
    assert split(11, 3, (1.0, 1.0, 1.6)) == [3, 3, 5]
    assert split(7, 2, (1.0, 1.0)) == [4, 3]
    assert split(10, 3, (0.01, 3.0, 2.0)) == [1, 5, 4], "a device has one piece at least, beside which others share"
    assert split(3, 3, (9.0, 1.0, 1.0)) == [1, 1, 1]


def test_layouts_with_more_pieces_divide_the_batch_and_load_devices_equally() -> None:
    def pieces(**options: Any) -> list[int]:
        return [each.pieces for each in make(**options).with_more_pieces()]

    assert pieces(batch_size=48, devices=2, pieces=2) == [4, 8, 16, 48]
    assert pieces(batch_size=48, devices=3, pieces=3) == [6, 12, 24, 48]
    assert pieces(batch_size=30, devices=2, pieces=2) == [6, 30], "5 pieces and 15 would load them unequally"
    assert pieces(batch_size=48, devices=3, pieces=4) == [8, 16, 48]  # unequal already
    assert pieces(batch_size=48, pieces=48) == []


def test_what_follows_from_a_layout() -> None:
    ddp, dp = (
        make(devices=2, num_nodes=3, batch_size=66),
        make(strategy="dp", one_process=True, devices=3, batch_size=66),
    )
    staged = make(strategy="stages", devices=4, weights="staged", pieces=6, batch_size=66)
    single = make(strategy="single")
    layouts = (ddp, dp, single, staged)
    assert [each.world_size for each in layouts] == [6, 1, 1, 4]
    assert [each.replicas for each in layouts] == [6, 1, 1, 1]
    assert [each.has_process_group for each in layouts] == [True, False, False, True]
    assert [each.num_devices for each in layouts] == [6, 3, 1, 4]
    assert [each.accumulate for each in layouts] == [1, 1, 1, 2]
    assert [each.piece_size for each in layouts] == [11, 22, 64, 11]
    assert staged.owned(3) == range(6)
