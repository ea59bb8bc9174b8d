"""Workers that die, hang or fail where nobody trains, and the others that go on (launch/survival.py, survivor.py)."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import TIMEOUT

from lockstep.arithmetic.layout import resolve
from lockstep.errors import UserError, WorkerFailed
from lockstep.launch import rendezvous
from lockstep.launch import survivor as workers_side
from lockstep.launch.environment import environment
from lockstep.launch.parent import launch
from lockstep.launch.process_group import gather_objects
from lockstep.launch.survival import Survival
from lockstep.launch.survivor import survivor

pytestmark = pytest.mark.usefixtures("processes")
FOUR = resolve(strategy="ddp", accelerator="cpu", devices=4, num_nodes=1, batch_size=8)


def surviving(work: Callable[..., Any], *args: Any, replacements: int = 0, hang_timeout: float = TIMEOUT) -> Any:
    options = Survival(lambda workers: (*args, workers), replacements)
    return launch(work, *args, 4, layout=FOUR, hang_timeout=hang_timeout, survival=options)


def group() -> int:
    worker = survivor()
    assert worker is not None
    return worker.group.number


def sums(dies: dict[int, list[int]], how: str, workers: int) -> tuple[int, list[int], int]:
    """Add numbers up in one collective after the other. In group g the ranks of `dies[g]` die at the tenth."""
    assert workers == environment().world_size == dist.get_world_size()
    total = torch.zeros(1 << 18, dtype=torch.int64)
    for number in range(20):
        part = torch.full_like(total, dist.get_rank())
        handle = dist.all_reduce(part, async_op=True)
        if number == 10 and environment().rank in dies.get(group(), ()):
            if how == "later":
                handle.wait()
            os.kill(os.getpid(), signal.SIGSTOP if how == "stops" else signal.SIGKILL)
        handle.wait()
        total += part
    return int(total[0]), gather_objects(os.getpid()), environment().restarts


@pytest.mark.parametrize("how", ["inside", "later"])
@pytest.mark.parametrize(
    ("dies", "left"), [({0: [1]}, 3), ({0: [0]}, 3), ({0: [1, 2]}, 2), ({0: [3], 1: [0]}, 2), ({0: [0, 1, 2]}, 1)]
)
def test_the_others_begin_again_in_their_processes(dies: dict[int, list[int]], left: int, how: str) -> None:
    total, pids, restarts = surviving(sums, dies, how)
    assert total == 20 * sum(range(left))
    assert len({*pids}) == left
    assert restarts >= len(dies)  # two that die at once may be noticed one after the other


def test_new_workers_replace_lost_ones_as_often_as_it_is_allowed(capfd: pytest.CaptureFixture[str]) -> None:
    total, pids, restarts = surviving(sums, {0: [0], 1: [3], 2: [1]}, "inside", replacements=2)
    assert (total, len({*pids}), restarts) == (20 * (0 + 1 + 2), 3, 3)
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition("; ")[2] for line in lines] == [
        "continuing with 4 of 4 workers, 1 restarts left",
        "continuing with 4 of 4 workers, 0 restarts left",
        "continuing with 3 of 4 workers, 0 restarts left",
    ]
    assert lines[0].startswith("rank 0 was killed by SIGKILL")


def test_a_worker_that_stands_still_counts_as_dead(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    total, pids, _ = surviving(sums, {0: [2]}, "stops", hang_timeout=20.0)
    assert (total, len(pids)) == (20 * 3, 3)
    assert "rank 2 did not join the other ranks within 20 s (hang_timeout)" in capfd.readouterr().err
    assert time.monotonic() - began < TIMEOUT


def rejoins(workers: int) -> int:
    """Ranks die one after the other before they join their next group."""
    if group() == 0 and environment().rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return workers


@pytest.mark.parametrize(("dies", "replacements", "workers"), [(0, 0, 2), (1, 0, 2), (1, 2, 4)])
def test_a_death_while_the_others_join_a_group(
    dies: int, replacements: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new worker and one whose start of a group has failed find each other: torch gives both groups one name."""
    join = workers_side.join_new_group

    def join_or_die(*args: Any) -> None:
        if group() == 1 and environment().rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        join(*args)

    monkeypatch.setattr(rendezvous, "CONNECT_TIMEOUT", timedelta(seconds=TIMEOUT))
    monkeypatch.setattr(workers_side, "join_new_group", join_or_die)
    began = time.monotonic()
    assert surviving(rejoins, replacements=replacements) == workers
    assert time.monotonic() - began < TIMEOUT, "nobody waits for that long, however busy the machine is"


def fails(error: BaseException, workers: int) -> None:
    if environment().rank == 1:
        raise error
    dist.barrier()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("seven"), WorkerFailed, "rank 1 failed: ValueError: seven"),
        (UserError("lr=7: must be six"), UserError, "^lr=7: must be six$"),
        (SystemExit(3), WorkerFailed, "rank 1 failed: the worker called exit with code 3"),
    ],
)
def test_an_error_ends_the_run_since_it_would_come_again(error: BaseException, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        surviving(fails, error, replacements=9)


def test_a_run_ends_when_the_last_worker_has_died() -> None:
    with pytest.raises(WorkerFailed, match="was killed by SIGKILL"):
        surviving(sums, {0: [0, 1, 2, 3]}, "later")


def dies_at_the_end(workers: int) -> str:
    if environment().rank == 0:
        time.sleep(0.2)  # the others wait for this rank's result
        if group() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return f"{workers} workers"


def test_nobody_has_ended_before_all_have_the_result() -> None:
    assert surviving(dies_at_the_end) == "3 workers"


def asks_to_end(workers: int) -> None:
    if environment().rank == 1:
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)


def test_a_signal_ends_the_run() -> None:
    from lockstep.launch.signals import Interrupted

    with pytest.raises(Interrupted, match="SIGTERM"):
        surviving(asks_to_end)
