"""Seconds from a command to its test accuracy on MNIST: our recipes against the program of pytorch/examples. Real
commands, one at a time, with all cores; the opponent runs once, in the midst of ours, and takes some minutes."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from parts.players import Row, program

from lockstep.run.summary import summary_of

RECIPES = {"mnist_fast": (0.99, 20.0), "mnist_best": (0.995, 7.0)}  # test accuracy; goal: times as fast as the opponent
OPPONENT, OPPONENT_TARGET = "pytorch/examples", 0.99


def accuracy(data_dir: str, seeds: Sequence[int] = range(5), overrides: Sequence[str] = ()) -> list[Row]:
    """A row for each recipe: means over seeds. `overrides` are for our runs.

    Raises:
        RuntimeError: a command failed.
    """
    order = [(name, seed) for seed in seeds for name in RECIPES]
    order.insert(len(order) // 2, (OPPONENT, 0))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*RECIPES, OPPONENT)}
    for name, seed in order:
        one = opponent(data_dir) if name == OPPONENT else recipe(name, seed, data_dir, overrides)
        found[name].append(one)
    ((_, other),) = found[OPPONENT]
    rows = []
    for name, (target, goal) in RECIPES.items():
        reached = [accuracy for accuracy, _ in found[name]]
        took = mean(seconds for _, seconds in found[name])
        what = f"{name}, {target:.1%} of MNIST's test images: times as fast as {OPPONENT} to {OPPONENT_TARGET:.1%}"
        told = f"test accuracy {mean(reached):.2%} ({', '.join(f'{value:.2%}' for value in reached)})"
        rows.append(Row(what, took, other, other / took, goal, at_least=True, check=told))
    return rows


def recipe(name: str, seed: int, data_dir: str, overrides: Sequence[str]) -> tuple[float, float]:
    """Test accuracy of one run of ours, and seconds until it stood in summary.json."""
    with tempfile.TemporaryDirectory() as outputs:
        own = [f"experiment={name}", f"seed={seed}", f"data_dir={data_dir}", f"outputs={outputs}", "name=run"]
        began = time.time()
        program("src/train.py", *own, *overrides)
        (folder,) = Path(outputs, "run").iterdir()
        ended = (folder / "summary.json").stat().st_mtime
        return float(summary_of(folder)["metrics"]["test/acc"]), ended - began


def opponent(data_dir: str) -> tuple[float, float]:
    """The same of the opponent; its own clock starts with its first line."""
    where = "scripts/bench/opponents/examples_mnist.py"
    said = program(where, f"--data-dir={data_dir}", f"--target={OPPONENT_TARGET}")
    reached, seconds = re.findall(r"test/acc ([\d.]+)  ([\d.]+) s", said)[-1]
    return float(reached), float(seconds)
