"""Measure how the cost of a run grows with pieces, devices, samples and steps. docs/growth.png shows it.

Each axis is a series of whole runs of train.py that differ in one number; they take turns. A row of the table compares
the last with the first. Each process has one thread.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.players import Row, program, row
from bench.programs import watch
from repository import ROOT

from lockstep.programs.common.showing import our_pyplot, style
from lockstep.report.summary import summary_of

PICTURE = ROOT / "docs" / "growth.png"
TASK = ["data=synthetic", "data.val_fraction=0", "callbacks.checkpoint.monitor=null", "scheduler=constant", "threads=1"]
TASK += ["logger=none", "max_epochs=1000000", "+debug.trainer.limit_test_batches=1"]
BATCH = 256
AXES = {  # numbers, and the overrides of a run
    "pieces": ((1, 2, 4, 8, 16, 32, 64), f"pieces={{}} batch_size={BATCH} data.samples=10000 max_steps=40"),
    "devices": ((1, 2, 4, 8), f"devices={{}} pieces=8 batch_size={BATCH} data.samples=10000 max_steps=40"),
    "samples": ((1_000, 10_000, 100_000, 1_000_000), f"data.samples={{}} batch_size={BATCH} max_steps=40"),
    "steps": ((100, 1_000, 10_000), "max_steps={} batch_size=16 data.samples=10000"),
}
# Print the seconds and MiB of the data set alone, in a new process: uint8 images, int64 labels.
OPEN_DATA = """
import sys, time
sys.path.insert(0, sys.argv[1])
from lockstep.config.check import check
from lockstep.commands.api import compose
from lockstep.data.build import open_data
config = check(compose(*sys.argv[2:]))
began = time.perf_counter()
splits = open_data(config.data, config.data_dir, config.seed)
images, labels = splits.train.images, splits.train.labels
print(time.perf_counter() - began, 1.2 * (images.nbytes + labels.nbytes) / 2**20)  # a fifth more for the test split
"""
TITLES = {"step": "ms a step", "start": "s to the first step", "memory": "MiB, all processes"}
GROWTH_GOAL = 1.1  # the goal for quantities that must not grow


@dataclass(frozen=True)
class Cost:
    """The cost of one run without its data set.

    Seconds to the first step, ms per step, and MiB of all processes together, with shared pages counted once.
    """

    start: float
    step: float
    memory: float


def growth(rounds: int = 2) -> list[Row]:
    """Run all axes, draw them, and return the rows."""
    results: dict[str, dict[int, list[Cost]]] = {}
    for axis, (numbers, overrides) in AXES.items():
        results[axis] = {number: [] for number in numbers}
        for number in numbers * rounds:
            results[axis][number].append(measure([*TASK, *overrides.format(number).split()]))
    draw(results)
    goals = {("samples", "start"): GROWTH_GOAL, ("samples", "step"): GROWTH_GOAL, ("samples", "memory"): GROWTH_GOAL}
    goals |= {("steps", "step"): GROWTH_GOAL, ("steps", "memory"): GROWTH_GOAL}
    rows = []
    for axis, runs in results.items():
        first, *_, last = runs
        for field, unit in (("start", "s"), ("step", "ms"), ("memory", "MiB")):
            ours, other = ([getattr(taken, field) for taken in runs[number]] for number in (last, first))
            what = f"{last:,} {axis} against {first:,}: {field}"
            rows.append(row(what, ours, other, goals.get((axis, field)), unit=unit))
    return rows


def measure(overrides: list[str]) -> Cost:
    """Run train.py once and return its cost."""
    with tempfile.TemporaryDirectory() as outputs:
        _, memory = watch(["src/train.py", *overrides, f"outputs={outputs}"], workers=True)
        (file,) = Path(outputs).rglob("summary.json")
        ended = summary_of(file.parent)
    opening, data = map(float, program("-c", OPEN_DATA, str(ROOT / "src"), *overrides).split())
    speed = ended["throughput"]
    step = 1000 * ended["layout"]["batch_size"] / speed["samples_per_second"]
    return Cost(speed["seconds_to_first_step"] - opening, step, memory - data)


def draw(results: dict[str, dict[int, list[Cost]]]) -> None:
    """Draw medians over rounds, with a column of panels for each axis."""
    pyplot = our_pyplot()
    figure, panels = pyplot.subplots(3, len(results), figsize=(3 * len(results), 7.5), sharex="col")
    for column, (axis, runs) in zip(panels.T, results.items(), strict=True):
        for number, (panel, field) in enumerate(zip(column, TITLES, strict=True)):
            values = [median(getattr(taken, field) for taken in each) for each in runs.values()]
            panel.plot(list(runs), values, **style(number))
            panel.set(xscale="log", ylim=(0, 1.25 * max(values)), ylabel=TITLES[field] if axis == "pieces" else "")
        column[0].set_title(axis)
        column[-1].set(xlabel=axis, xticks=list(runs), xticklabels=[f"{number:,}" for number in runs])
        column[-1].minorticks_off()
    figure.savefig(PICTURE)
