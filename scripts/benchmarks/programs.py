"""Whole programs: from the command to the first step, to the accuracy, and the memory that they take."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import resident
import startup
import time_to_accuracy
from benchmarks.players import Row, row

START = {  # what `startup.measure` tells, with the goal for its ratio
    "start": ("command to first step, one device: against importing torch, torchvision, lightning", startup.RATIO),
    "ddp": ("command to first step, ddp on 2: against one device", None),
    "job": ("a sweep's further job, whole: against a run by itself", None),
    "command": ("command to exit, two steps and a test: against those imports", None),
}
AHEAD = {"mnist_fast": 20.0, "mnist_best": 7.0}  # goals: times as fast as the opponent


def start(folder: Path, data_dir: str, rounds: int = 5) -> tuple[list[Row], dict[str, Any]]:
    """Goal 3."""
    found = startup.measure(rounds)
    rows = [row(what, found[name]["ours"], found[name]["other"], goal) for name, (what, goal) in START.items()]
    return rows, {"goals": startup.goals(found)}


def memory(folder: Path, data_dir: str, rounds: int = 1) -> tuple[list[Row], dict[str, Any]]:
    """Goal 7."""
    found = resident.measure(rounds)
    what = "a worker's peak resident memory, against a bare loop's"
    rows = [
        row(f"{name}: {what}", case["ours"], case["other"], resident.GOAL, unit="MiB") for name, case in found.items()
    ]
    return rows, {"resident": found}


def accuracy(folder: Path, data_dir: str) -> tuple[list[Row], dict[str, Any]]:
    """Goal 6."""
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
