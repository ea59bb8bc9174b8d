"""Whole programs: from the command to the first step, to the accuracy, and the memory that they take."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from typing import Any

import time_to_accuracy
from benchmarks import resident, startup
from benchmarks.players import Row, row

AHEAD = {"mnist_fast": 20.0, "mnist_best": 7.0}  # goals: times as fast as the opponent


def start(folder: Path, data_dir: str, rounds: int = 3) -> tuple[list[Row], dict[str, Any]]:
    """The command to its first step and to its end, ddp and sweeps beside it."""
    found = startup.measure(rounds)
    middle = {name: (median(pair["ours"]), median(pair["other"])) for name, pair in found.items()}
    one, two = middle["ddp"][1], middle["ddp"][0]
    bare = "importing torch, torchvision, lightning"
    rows = [
        row(f"command to first step: against {bare}", *_sides(found["start"]), startup.RATIO),
        row(f"command to exit, with two steps and a test: against {bare}", *_sides(found["command"]), None),
        Row("ddp on 2 to its first step: seconds later than one device", two, one, two - one, startup.SECONDS),
        Row("a further job of a sweep, whole: its seconds", *middle["job"], middle["job"][0], startup.SECONDS),
    ]
    return rows, {"start": found}


def _sides(pair: dict[str, Any]) -> tuple[list[float], list[float]]:
    return pair["ours"], pair["other"]


def memory(folder: Path, data_dir: str, rounds: int = 1) -> tuple[list[Row], dict[str, Any]]:
    """Peak memory of a worker."""
    found = resident.measure(rounds)
    what = "a worker's peak resident memory, against a bare loop's"
    rows = [
        row(f"{name}: {what}", case["ours"], case["other"], resident.GOAL, unit="MiB") for name, case in found.items()
    ]
    return rows, {"resident": found}


def accuracy(folder: Path, data_dir: str) -> tuple[list[Row], dict[str, Any]]:
    """The recipes against the program of pytorch/examples."""
    found = time_to_accuracy.measure(data_dir)
    racers = {racer["recipe"]: racer for racer in found["racers"]}
    other = racers[time_to_accuracy.OPPONENT]
    rows = []
    for name, goal in AHEAD.items():
        racer = racers[name]
        reached = ", ".join(f"{value:.2%}" for value in racer["accuracy"])
        rows.append(
            Row(
                f"{name}, {racer['target']:.1%} of MNIST's test images: times as fast as pytorch/examples to 99.0%",
                mean(racer["to_result"]),
                mean(other["to_result"]),
                racer["ratio"],
                goal,
                at_least=True,
                check=f"test accuracy {mean(racer['accuracy']):.2%} ({reached})",
            )
        )
    return rows, found
