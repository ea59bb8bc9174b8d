"""The fixture `ranks`: its collectives are those of torch, a fault ends all ranks with its line, and none hangs.

It builds on a private module of torch (tests/thread_ranks.py); these tests fail when upstream changes it.
"""

import ctypes
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from thread_ranks import Ranks, RanksHang, one_at_a_time, place_of

from lockstep.errors import UserError
from lockstep.launch.environment import environment, external_workers
from lockstep.lightning.torch_ddp import number_of_collectives


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_collectives_are_those_of_torch(ranks: Ranks, world: int) -> None:
    last = world - 1

    def collectives(rank: int) -> list[Any]:
        sums, largest, sent = (torch.tensor([rank + 1, 10 * rank]) for _ in range(3))
        dist.all_reduce(sums)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.broadcast(sent, world - 1)
        parts = [torch.zeros(2, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(parts, torch.tensor([rank, -rank]))
        scattered, joined = torch.zeros(2, dtype=torch.int64), torch.zeros(world, dtype=torch.int64)
        dist.reduce_scatter_tensor(scattered, torch.arange(2 * world) * (rank + 1))
        dist.all_gather_into_tensor(joined, torch.tensor([rank]))
        assert scattered.tolist() == [each * world * (world + 1) // 2 for each in (2 * rank, 2 * rank + 1)]
        assert joined.tolist() == list(range(world))
        received = [torch.zeros(1) for _ in range(world)] if rank == last else None
        dist.gather(torch.tensor([2.0 * rank]), received, dst=last)
        dist.scatter(mine := torch.zeros(1), received, src=last)
        assert mine.item() == 2 * rank
        objects: list[Any] = [None] * world
        dist.all_gather_object(objects, {"rank": "x" * rank})
        dist.barrier()
        gathered = [part.tolist() for part in parts]
        return [sums.tolist(), largest.tolist(), sent.tolist(), gathered, objects, number_of_collectives()]

    for result in ranks(world, collectives):
        *values, count = result
        assert values == [
            [world * (world + 1) // 2, 10 * world * last // 2],
            [world, 10 * last],
            [world, 10 * last],
            [[rank, -rank] for rank in range(world)],
            [{"rank": "x" * rank} for rank in range(world)],
        ]
        assert count >= 10, "number_of_collectives counts them"


def test_a_variable_that_a_rank_sets_reaches_the_c_library_when_all_ranks_have_ended(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may move the list of all variables, which another rank reads there."""
    monkeypatch.setenv("REMOVED", "1")
    read = ctypes.CDLL(None).getenv
    read.restype = ctypes.c_char_p

    def change(rank: int) -> Any:
        os.environ[f"RANK_{rank}"] = str(rank)
        os.environ.pop("REMOVED", None)
        dist.barrier()
        return os.environ["RANK_0"], read(b"RANK_0"), read(b"REMOVED")

    assert ranks(2, change) == [("0", None, b"1")] * 2
    assert [read(name) for name in (b"RANK_0", b"RANK_1", b"REMOVED")] == [b"0", b"1", None]


def test_a_rank_that_waits_gives_up_its_turn_and_goes_on_with_its_random_numbers(ranks: Ranks) -> None:
    """Else a pass that gathers weights would wait for ever, or draw what depends on other ranks."""

    def draws(rank: int, alone: bool = False) -> list[float]:
        with one_at_a_time:
            torch.manual_seed(rank)
            first = torch.rand(2)
            if not alone:
                dist.all_reduce(torch.ones(1))
            return [*first.tolist(), *torch.rand(2).tolist()]

    assert ranks(3, draws) == [draws(rank, alone=True) for rank in range(3)]


def test_a_sum_of_floats_depends_on_who_adds_what(ranks: Ranks) -> None:
    """Else no comparison of layouts here could find a sum that depends on its order."""
    values = torch.tensor([1e8, 1.0, -1e8, 1.0])

    def total(world: int) -> float:
        def part(rank: int) -> float:
            share = values.chunk(world)[rank].sum()
            dist.all_reduce(share)
            return float(share)

        return float(ranks(world, part)[0])

    assert total(4) != total(2)


def test_results_are_in_rank_order_and_the_group_is_gone_afterwards(ranks: Ranks) -> None:
    start, zero = threading.Thread.start, getattr(rank_zero_only, "rank", None)
    assert ranks(4, lambda rank: (rank, dist.get_rank(), dist.get_world_size())) == [(r, r, 4) for r in range(4)]
    assert not dist.is_initialized()
    assert ranks(2, lambda rank: dist.get_world_size()) == [2, 2]
    assert threading.Thread.start is start
    assert getattr(rank_zero_only, "rank", None) == zero


def test_this_process_stays_no_worker(ranks: Ranks) -> None:
    assert ranks(3, lambda rank: (external_workers(), environment().rank)) == [(0, 0)] * 3
    assert (environment().launcher, external_workers()) == (None, 0)
    place = place_of(3, 4, machines=2, restarts=1)
    assert (place.rank, place.local_rank, place.num_nodes, place.external_workers, place.restarts) == (3, 1, 2, 4, 1)


def test_a_thread_that_a_rank_starts_has_its_group(ranks: Ranks) -> None:
    def in_thread(rank: int) -> Any:
        seen: list[Any] = []

        def work() -> None:
            dist.broadcast(number := torch.tensor(rank), 1)
            seen.append((dist.get_rank(), int(number)))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return seen

    assert ranks(2, in_thread) == [[(0, 1)], [(1, 1)]]


def test_some_of_the_ranks_have_a_group_of_gloo(ranks: Ranks) -> None:
    """As the ranks that write checkpoints have."""

    def subgroup(rank: int) -> float:
        group: Any = dist.new_group([0, 2], timedelta(seconds=20), "gloo")
        value = torch.tensor(float(rank))
        if rank != 1:
            dist.all_reduce(value, group=group)
        return float(value)

    assert ranks(3, subgroup) == [2, 1, 2]


def test_the_first_error_ends_all_ranks_and_its_rank_is_named(ranks: Ranks) -> None:
    def fails(rank: int) -> None:
        if rank == 1:
            raise ValueError("of this rank")
        dist.barrier()

    started = time.monotonic()
    with pytest.raises(ValueError, match="of this rank") as error:
        ranks(3, fails)
    assert error.value.__notes__ == ["on rank 1 of 3"]
    assert time.monotonic() - started < 10


def test_an_error_may_be_a_result(ranks: Ranks) -> None:
    def refuses(rank: int) -> int:
        dist.barrier()
        if rank:
            raise UserError(f"refused by {rank}")
        return rank

    assert [str(result) for result in ranks(3, refuses, errors=UserError)] == ["0", "refused by 1", "refused by 2"]
    with pytest.raises(UserError, match="refused by"):
        ranks(3, refuses)


def test_a_rank_that_has_ended_or_calls_something_else_is_named(ranks: Ranks) -> None:
    with pytest.raises(RanksHang, match=r"rank 0 has ended, and rank [12] waits for it in .'allreduce'"):
        ranks(3, lambda rank: dist.barrier() if rank else None)
    with pytest.raises(RanksHang, match=r"collective 1: rank . calls .*, and rank . "):
        ranks(2, lambda rank: dist.barrier() if rank else dist.broadcast(torch.zeros(1), 0))
    with pytest.raises(RanksHang, match=r"collective 1: .*\([23],\).* and rank . "):
        ranks(2, lambda rank: dist.all_reduce(torch.zeros(2 + rank)))
    with pytest.raises(RanksHang, match=r"collective 1: .*'reduce_scatter', .*\([23],\).* and rank . "):
        ranks(2, lambda rank: dist.reduce_scatter_tensor(torch.zeros(2 + rank), torch.zeros(4 + 2 * rank)))


@pytest.mark.usefixtures("whole_run")
def test_ranks_that_take_too_long_are_named_with_their_lines(ranks: Ranks) -> None:
    release = threading.Event()
    with pytest.raises(RanksHang, match=r"after 0.2 s: rank 0 in .*, rank 1 in .*test_ranks_group.py"):
        ranks(2, lambda rank: release.wait(1) if rank else dist.barrier(), seconds=0.2)
