"""What ranks agree on before training: decisions of rank zero, who writes, and a barrier with a timeout."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from thread_ranks import Ranks, place_of
from torch.distributed import HashStore

from lockstep.errors import UserError
from lockstep.launch import process_group
from lockstep.launch.process_group import (
    barrier_with_timeout,
    broadcast_from_rank_zero,
    decide_on_rank_zero,
    gather_objects,
    ranks_writing_in,
)


def test_values_are_gathered_in_rank_order_and_rank_zeros_is_broadcast(ranks: Ranks) -> None:
    assert ranks(3, lambda rank: gather_objects({"rank": rank})) == [[{"rank": rank} for rank in range(3)]] * 3
    assert ranks(3, lambda rank: broadcast_from_rank_zero(rank + 7)) == [7] * 3
    assert gather_objects("alone") == ["alone"]


# --- decisions --------------------------------------------------------------------------------------------------------


def test_rank_zero_decides(ranks: Ranks) -> None:
    """The others do not make a value: it may be a time or a random name."""
    made: list[int] = []

    def of_rank(rank: int) -> Any:
        def make() -> list[Any]:
            made.append(rank)
            return [rank, "name", None]

        return decide_on_rank_zero("folder", make, place_of(rank, 4))

    assert ranks(4, of_rank) == [[0, "name", None]] * 4
    assert made == [0]


def test_a_refusal_of_rank_zero_appears_on_all_ranks(ranks: Ranks) -> None:
    def of_rank(rank: int) -> Any:
        def make() -> None:
            raise UserError(f"refused by rank {rank}: give another")

        return decide_on_rank_zero("folder", make, place_of(rank, 3))

    errors = ranks(3, of_rank, errors=UserError)
    assert [str(error) for error in errors] == ["refused by rank 0: give another"] * 3


def test_without_workers_a_decision_is_made_here() -> None:
    assert decide_on_rank_zero("folder", lambda: (1, 2)) == (1, 2), "not even through JSON"


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the files with the decided values of the agents of two machines, in a temporary folder each."""
    files = [tmp_path / "agent-0.json", tmp_path / "agent-1.json"]
    monkeypatch.setattr(process_group, "_decisions_file", lambda here: files[here.rank // 2])
    return files


@pytest.mark.parametrize("machine", [0, 1])
def test_what_any_machine_has_stored_is_what_all_use_after_a_restart(
    ranks: Ranks, agents: list[Path], machine: int
) -> None:
    """torchrun may have given rank zero to a machine that joined later."""

    def of_rank(rank: int, value: str) -> Any:
        return decide_on_rank_zero("folder", lambda: value, place_of(rank, 4, machines=2, launcher="torchrun"))

    assert ranks(4, lambda rank: of_rank(rank, "first")) == ["first"] * 4
    assert all(file.exists() for file in agents)
    agents[1 - machine].unlink()
    assert ranks(4, lambda rank: of_rank(rank, "second")) == ["first"] * 4
    for file in agents:
        file.unlink()
    assert ranks(4, lambda rank: of_rank(rank, "second")) == ["second"] * 4, "the control"


def test_several_decisions_are_stored_beside_each_other(ranks: Ranks, agents: list[Path]) -> None:
    def of_rank(rank: int, number: int) -> Any:
        here = place_of(rank, 4, machines=2, launcher="torchrun")
        return [decide_on_rank_zero(name, lambda: f"{name} {number}", here) for name in ("one", "two")]  # noqa: B023

    first = ranks(4, lambda rank: of_rank(rank, 1))
    assert first == [["one 1", "two 1"]] * 4
    assert ranks(4, lambda rank: of_rank(rank, 2)) == first


def test_the_file_of_an_agent_that_has_exited_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old = tmp_path / "lockstep-agent-4194305-77.json"
    old.touch()
    (tmp_path / "lockstep-agent-no-number.json").touch()
    file = process_group._decisions_file(place_of(0, 2, launcher="torchrun"))
    assert file is not None
    assert file.name.startswith(f"lockstep-agent-{os.getppid()}-")
    assert not old.exists()
    assert process_group._decisions_file(place_of(0, 2)) is None, "an engine that restarts no ranks"


# --- who writes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folders", "writers"),
    [
        ("aa", [0]),  # two ranks on one machine
        ("aabb", [0, 2]),
        ("aaaa", [0]),  # two machines with a shared folder
        ("aabbcc", [0, 2, 4]),
        ("aaaabb", [0, 4]),  # the first two of three machines share a folder
    ],
)
def test_rank_zero_and_the_first_rank_of_each_machine_without_its_folder_write(
    ranks: Ranks, tmp_path: Path, folders: str, writers: list[int]
) -> None:
    machines = 1 if len(folders) == 2 else len(folders) // 2

    def of_rank(rank: int) -> list[int]:
        return ranks_writing_in(tmp_path / folders[rank] / "run", place_of(rank, len(folders), machines))

    assert ranks(len(folders), of_rank) == [writers] * len(folders)
    assert [list(path.iterdir()) for path in tmp_path.glob("*/run")] == [[]], "no mark is left"


def test_a_process_that_is_no_worker_writes(tmp_path: Path) -> None:
    assert ranks_writing_in(tmp_path) == [0]


# --- a barrier with a timeout -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [(), (1,)])
def test_a_barrier_ends_without_a_rank_that_does_not_come(ranks: Ranks, missing: Sequence[int]) -> None:
    store = HashStore()

    def of_rank(rank: int) -> bool | None:
        if rank in missing:
            return None
        return barrier_with_timeout("here", 0.2 if missing else 20.0, place_of(rank, 3), store)

    assert ranks(3, of_rank) == [None if rank in missing else not missing for rank in range(3)]


def test_barriers_of_other_names_are_others(ranks: Ranks) -> None:
    store = HashStore()
    results = ranks(2, lambda rank: barrier_with_timeout(f"step {rank}", 0.1, place_of(rank, 2), store))
    assert results == [False, False]


def test_without_a_store_present_is_no_barrier() -> None:
    assert not barrier_with_timeout("here", 1.0)
