"""The account of a storm, and the checks of a network that is cut."""

import os
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest
from campaigns.cuts import command_of, folders_written_by, overlaps, parent_of, without_children
from campaigns.fleet import traceback_of_program
from campaigns.goodput import draw, goodput, groups_of
from campaigns.storm import CUT, KILLED, SERVER, Plan


def worker(pid: int, world: int, began: float, steps: dict[int, float], ends: float = 0.0) -> list[dict[str, Any]]:
    """Return the events of a worker whose group is as its own: 1 s until it exists, then 1 s for each part of its
    start."""
    points = {"born": began + 1, "checked": began + 2, "read": began + 3}
    events = [{"what": "starts", "time": began + 3, "group": f"of {pid}", "world": world, **points}]
    events += [{"what": "begins", "time": began + 4, "step": min(steps) - 1}]
    events += [{"what": "step", "time": moment, "step": step} for step, moment in steps.items()]
    events += [{"what": "ends", "time": ends}] if ends else []
    return [{"pid": pid, **event} for event in events]


# Three machines take a step a second, from 10 on, and a storm begins at 15. A link is cut for 2 s at 16. A machine is
# lost at 20.5; what was saved is step 8. Two machines go on at 25, with 1.5 s a step, until 40.
CALM = worker(1, 3, 6.0, {1: 11, 2: 12, 3: 13, 4: 14, 5: 15, 6: 16, 7: 19, 8: 20}, ends=21.0)
AFTER = worker(2, 2, 21.0, {8: 26.5, **{step: 26.5 + 1.5 * (step - 8) for step in range(9, 18)}})


def test_each_second_of_a_storm_has_one_cause() -> None:
    result = goodput([*CALM, *AFTER], began=15.0, ended=40.0, strikes=[(1.0, CUT), (5.5, KILLED)])
    assert result.rate == 1.0
    assert result.lost == {
        "waiting in a step": 2.0,
        "noticing": 1.0,
        "rendezvous": 1.0,
        "start": 1.0,
        "reading": 1.0,
        "first step": 1.0,
        "repeated steps": 1.5,
        "fewer machines": 4.5,
    }
    assert len(result.steps) == 12
    assert result.share == pytest.approx(12 / 25)
    assert sum(result.lost.values()) + 12 == 25.0
    assert "| useful steps | 6.00 | 48% |" in [*result.lines()]


def test_a_storm_is_drawn(tmp_path: Path) -> None:
    storm = goodput([*CALM, *AFTER], began=15.0, ended=40.0, strikes=[(1.0, CUT), (5.5, KILLED)])
    draw({"one": storm, "two": storm}, tmp_path / "storm.png")
    assert (tmp_path / "storm.png").stat().st_size > 10_000


def test_a_traceback_of_torchrun_is_not_the_programs() -> None:
    prefix = "E1126 17:18:31.431000 23959 torch/distributed/elastic/agent/server/api.py:1007] "
    torchruns = f"completed\n{prefix}Error waiting on exit barrier.\n{prefix}Traceback (most recent call last):\n"
    custom = "Traceback (most recent call last):\n  ...\nKeyError: 1\n"
    assert traceback_of_program(torchruns) == ""
    assert traceback_of_program(torchruns + custom) == custom
    assert traceback_of_program(custom) == custom


def test_the_hosts_schedule() -> None:
    kinds = Plan(every=15, strikes=16, server_every=120, calm=0).kinds(Random(0))
    assert [number for number, kind in enumerate(kinds) if kind == SERVER] == [7, 15]
    assert {*kinds} == {KILLED, CUT, SERVER}
    assert SERVER not in Plan(every=15, strikes=16, server_every=0, calm=0).kinds(Random(0))


def test_two_groups_at_once_are_seen() -> None:
    assert overlaps(groups_of([*CALM, *AFTER])) == []
    late = worker(3, 1, 10.0, {1: 19.5, 2: 20.5})
    (line,) = overlaps(groups_of([*CALM, *late]))
    assert line == "two groups took steps at once for 0.5 s: 3 machines (of 1) and 1 machine (of 3)"


def test_writers_are_seen(tmp_path: Path) -> None:
    folder = tmp_path / "name" / "run"
    folder.mkdir(parents=True)
    with (folder / "rank_1.log").open("w"), (folder / ".lock").open("w"):
        assert folders_written_by(os.getpid(), {str(tmp_path)}) == set(), "these are not rank zero's"
    with (folder / "train.log").open("w"):
        assert folders_written_by(os.getpid(), {str(tmp_path)}) == {str(folder)}
    with (folder / "train.log").open():
        assert folders_written_by(os.getpid(), {str(tmp_path)}) == set(), "it reads"


def test_a_child_with_its_parents_files_is_no_second_writer(tmp_path: Path) -> None:
    file = tmp_path / "name" / "run" / "train.log"
    file.parent.mkdir(parents=True)
    with file.open("w") as log:
        child = subprocess.Popen(["sleep", "60"], pass_fds=[log.fileno()])
    try:
        assert folders_written_by(child.pid, {str(tmp_path)}) == {str(file.parent)}
        assert parent_of(child.pid) == os.getpid()
        while command_of(child.pid) != "sleep 60":  # it begins a little later
            assert child.poll() is None
        assert without_children({os.getpid(), child.pid}) == {os.getpid()}
        assert without_children({-1, child.pid}) == {-1, child.pid}, "the control: one is not the other's child"
    finally:
        child.kill()
        child.wait()
    assert parent_of(child.pid) is None
