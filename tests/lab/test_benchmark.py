"""The benchmark compares what is comparable: sides take turns, compute the same, and a wrong one is found."""

from pathlib import Path
from typing import Any

import pytest
from bench.players import OPPONENTS, play
from conftest import forked
from traces import STEP, per_step, traced

PLAYER = """
import sys, time
sys.path.insert(0, {opponents!r})
from turns import Turns
turns = Turns()
turns.begin()
for step in range({last}):
    began = time.monotonic()
    time.sleep(0.002)
    with open({log!r}, "a") as log:
        print(began, time.monotonic(), file=log)
    turns.step([])
sys.exit("it had enough")
"""


def player(folder: Path, name: str, last: int = 1000) -> tuple[list[str], Path]:
    program, log = folder / f"{name}.py", folder / f"{name}.log"
    program.write_text(PLAYER.format(opponents=str(OPPONENTS), log=str(log), last=last))
    return [str(program)], log


def test_players_never_run_at_the_same_time(tmp_path: Path) -> None:
    (one, first), (two, second), (three, third) = (player(tmp_path, name) for name in ("one", "two", "three"))
    actual = play({"one": [one], "both": [two, three]}, rounds=3, steps=5, skip=2, folder=tmp_path)
    assert [len(blocks) for blocks in actual.values()] == [3, 3]
    assert all(block >= 3 * 0.002 for blocks in actual.values() for block in blocks)
    spans = {
        log: [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
        for log in (first, second, third)
    }
    assert {len(span) for span in spans.values()} == {20}

    def together(a: Path, b: Path) -> bool:
        return any(x[0] < y[1] and y[0] < x[1] for x in spans[a] for y in spans[b])

    assert not together(first, second)
    assert not together(first, third)
    assert together(second, third)  # the control: programs of one player do


def test_a_player_that_ends_early_is_reported_with_its_last_words(tmp_path: Path) -> None:
    (one, _), (two, _) = player(tmp_path, "one"), player(tmp_path, "two", last=7)
    with pytest.raises(RuntimeError, match=r"two ended early:\n.*it had enough"):
        play({"one": [one], "two": [two]}, rounds=3, steps=5, folder=tmp_path)


def test_events_of_a_step_are_those_of_the_step_in_the_middle() -> None:
    def event(name: str, start: float, cat: str = "cpu_op") -> dict[str, Any]:
        return {"name": name, "ts": start, "dur": 10.0, "cat": cat}

    steps = [event(STEP, 10.0 * number) for number in (1, 2, 3, 4)]
    others = [event(STEP, 50.0, "gpu_user_annotation"), {"name": "gloo:all_reduce", "ts": 12}]
    reduced = [event("gloo:all_reduce", at) for at in (5, 15, 16, 25, 26, 31, 32, 33, 45)]
    actual = per_step([*steps, *others, *reduced, event("once", 15)])
    assert (actual["gloo:all_reduce"], actual["once"]) == (2, 0)


@pytest.mark.usefixtures("forked_commands")
def test_ranks_talk_as_often_with_more_pieces(tmp_path: Path) -> None:
    task = ["data=synthetic", "strategy=ddp", "devices=2", "batch_size=16", "threads=1"]
    actual = [traced([*task, f"pieces={pieces}"], tmp_path)["gloo:all_reduce"] for pieces in (2, 8)]
    assert actual[0] == actual[1] >= 1


REFUSED = [
    (["benchmark.py", "stepp"], "did you mean step?"),
    (["benchmark.py", "accuracy", "--data-dir=x"], "no MNIST/raw"),
    (["benchmark.py", "gpu"], "error: gpu: this machine has no GPU that torch can use"),
    (["gpu_day.py"], "torch finds no GPU on this machine: use --accelerator=cpu for a rehearsal"),
    (["gpu_day.py", "--accelerator=cpu", "bit"], "did you mean bits?"),
]


@pytest.mark.parametrize(("arguments", "output"), REFUSED)
def test_refusals_are_one_line(arguments: list[str], output: str) -> None:
    program, *options = arguments
    done = forked(f"scripts/lab/{program}", *options)
    assert done.returncode == 2
    assert output in done.stderr
    assert len(done.stderr.splitlines()) == 1
