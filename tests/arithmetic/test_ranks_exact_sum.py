"""Exact sums over ranks: the bits of one process, and each fault of a message or of an assignment is found."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_ranks import Ranks
from torch import Tensor

from lockstep.arithmetic.exact_sum import CheckedSum, CorruptMessage, ExactSum, reduce_alone

SHAPES = [(3,), (4, 2, 3), (1,), (20_000,)]
PIECES, STEPS = 7, 3
Piece = list[Tensor | None]


def pieces_of(step: int, growth: float = 1.0) -> list[Piece]:
    """Return the addends of a step, of very different sizes. One tensor is missing in some, another one in all."""
    numbers = torch.Generator().manual_seed(step)
    pieces: list[Piece] = []
    for piece in range(PIECES):
        values: Piece = [torch.randn(shape, generator=numbers) * 2.0 ** (piece - 3) * growth for shape in SHAPES]
        values[1] = values[1] if piece % 2 else None
        pieces.append([*values, None])
    return pieces


def all_reduce(tensor: Tensor, op: str) -> None:
    dist.all_reduce(tensor, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)


def sums(
    owners: Sequence[Sequence[int]],
    rank: int,
    growth: Sequence[float] = (1.0,) * STEPS,
    reduce: Any = all_reduce,
    names: Sequence[str] = (),
) -> list[tuple[list[Tensor], list[bool]]]:
    """Return the sums of all steps, and which tensors had an addend, where rank r adds the pieces `owners[r]`."""
    like = [torch.zeros(shape) for shape in (*SHAPES, (2,))]
    exact = (CheckedSum if names else ExactSum)(like, names=names)
    results = []
    for step in range(STEPS):
        pieces = pieces_of(step, growth[step])
        exact.begin(step)
        for piece in owners[rank]:
            exact.add(pieces[piece])
        total = exact.total(reduce, 2.0)
        results.append((total, list(exact.present)))
    return results


def same(one: Any, other: Any) -> bool:
    return all(
        present == other_present and all(torch.equal(a, b) for a, b in zip(total, other_total, strict=True))
        for (total, present), (other_total, other_present) in zip(one, other, strict=True)
    )


def alone(growth: Sequence[float] = (1.0,) * STEPS) -> Any:
    return sums([range(PIECES)], 0, growth, reduce_alone)


LAYOUTS = [
    [[0, 1, 2, 3], [4, 5, 6]],
    [[0, 1, 2], [3, 4], [5, 6]],
    [[0, 1], [2, 3], [4, 5], [6]],
    [[6, 2], [], [0, 1, 5], [4, 3]],  # in another order, and a rank without a piece
    [[piece] for piece in range(PIECES)],
]


@pytest.mark.parametrize("owners", LAYOUTS)
def test_the_bits_of_one_process(ranks: Ranks, owners: list[list[int]]) -> None:
    expected = alone()
    for result in ranks(len(owners), lambda rank: sums(owners, rank)):
        assert same(result, expected)
    assert expected[0][1] == [True, True, True, True, False]


def test_a_sum_in_floating_point_has_other_bits(ranks: Ranks) -> None:
    """The control: these addends would show another order."""

    def plain(owners: list[list[int]], rank: int) -> Tensor:
        total = torch.zeros(SHAPES[3])
        for piece in owners[rank]:
            value = pieces_of(0)[piece][3]
            assert value is not None
            total += value
        dist.all_reduce(total)
        return total

    two, seven = (ranks(len(owners), partial(plain, owners))[0] for owners in (LAYOUTS[0], LAYOUTS[4]))
    assert not torch.equal(two, seven)


@pytest.mark.parametrize("owners", [[[0, 1, 2, 3], [4, 5]], [[0, 1, 2, 3], [4, 5, 6, 6]], [[0, 1], [2, 3], [4, 5, 5]]])
def test_a_missing_or_repeated_piece_is_detected(ranks: Ranks, owners: list[list[int]]) -> None:
    expected = alone()
    for result in ranks(len(owners), lambda rank: sums(owners, rank)):
        assert not same(result, expected)


@pytest.mark.parametrize("growth", [(1.0, 2.0**9, 1.0), (1.0, 2.0**-30, 2.0**30), (0.0, 1.0, 0.0)])
@pytest.mark.parametrize("owners", LAYOUTS[1:4])
def test_what_outgrows_its_grid_or_shrinks_below_it(
    ranks: Ranks, owners: list[list[int]], growth: tuple[float, ...]
) -> None:
    """One rank may have put addends aside while another has not."""
    expected = alone(growth)
    for result in ranks(len(owners), lambda rank: sums(owners, rank, growth)):
        assert same(result, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_on_one_rank_is_nan_on_all(ranks: Ranks, value: float) -> None:
    def of_rank(rank: int) -> list[bool]:
        exact = CheckedSum([torch.zeros(2), torch.zeros(20_000), torch.zeros(3)])
        exact.add([torch.ones(2), torch.ones(20_000).index_fill(0, torch.tensor(9), value if rank == 1 else 1.0), None])
        return [bool(total.isnan().all()) for total in exact.total(all_reduce)]

    assert ranks(3, of_rank) == [[False, True, False]] * 3


def test_a_step_sends_one_message_also_if_a_tensor_never_has_a_value(ranks: Ranks) -> None:
    """The first step sends two more, since it has no grid yet."""

    def of_rank(rank: int) -> list[int]:
        messages = [0] * STEPS
        exact = ExactSum([torch.zeros(20_000), torch.zeros(17_000), torch.zeros(2)])

        def counting(tensor: Tensor, op: str) -> None:
            messages[step] += 1
            all_reduce(tensor, op)

        for step in range(STEPS):
            exact.begin(step)
            exact.add([torch.ones(20_000), None, torch.ones(2)])
            exact.total(counting)
        return messages

    assert ranks(2, of_rank) == [[3, 1, 1]] * 2


@pytest.mark.parametrize("names", ["abcde", ""])
def test_a_damaged_message_is_detected_by_the_rank_that_gets_it(ranks: Ranks, names: str) -> None:
    owners, expected = LAYOUTS[1], alone()

    def of_rank(rank: int) -> Any:
        messages = 0

        def damaging(tensor: Tensor, op: str) -> None:
            nonlocal messages
            all_reduce(tensor, op)
            messages += op == "sum"
            if rank == 1 and messages == STEPS + 1:  # that of the last step: the first one sends two
                tensor[5] ^= 1 << 40

        return sums(owners, rank, reduce=damaging, names=names)

    zero, one, two = ranks(3, of_rank, errors=CorruptMessage)
    assert same(zero, expected)
    assert same(two, expected)
    if names:
        assert str(one) == "step 3: the sums of a to c do not match what the ranks sent; none was applied"
    else:
        assert not same(one, expected), "the control: without checksums nobody sees it"
