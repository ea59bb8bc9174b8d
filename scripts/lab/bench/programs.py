"""Measure whole programs: time to the first step, time to an accuracy, and memory."""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from bench.players import Row, program, row
from repository import ROOT

from lockstep.report.summary import summary_of

BARE = "importing torch, torchvision, lightning"
START_GOAL = 1.15  # relative to the bare imports
LATER_GOAL = 1.5  # extra seconds of ddp, and seconds of a sweep's further job
MEMORY_CASES = {"small_cnn": (64, 200, 60_000), "resnet18": (32, 6, 6_000)}  # batch size, steps, images
RECIPES = {"mnist_fast": (0.99, 20.0), "mnist_best": (0.995, 7.0)}  # test accuracy; goal: times as fast as the opponent
OPPONENT, OPPONENT_TARGET = "pytorch/examples", 0.99
MEMORY_GOAL = 1.1  # largest ratio of a worker's peak to the bare loop's


def start(rounds: int = 3) -> list[Row]:
    """Time programs from the command to the first step and to the end.

    Each round runs in turn the bare imports, a run on one device, a run on two ddp workers, and a sweep of three jobs.
    The seconds of a run are those of its summary.json (from the first line of train.py to the end of the first step)
    plus the time to start the interpreter.
    """
    bare, one, two, whole, further = [], [], [], [], []
    for _ in range(rounds):
        interpreter = seconds("-c", "pass")
        bare.append(seconds("-c", BARE.replace("importing", "import")))
        (first,), _, took = train("max_steps=2")
        one.append(first + interpreter)
        whole.append(took)
        (first,), *_ = train("max_steps=2", "strategy=ddp", "devices=2")
        two.append(first + interpreter)
        _, ends, _ = train("max_steps=2", "-m", "seed=0,1,2")
        further.append(median(end - before for before, end in pairwise(ends)))
    later, job = median(two) - median(one), median(further)
    return [
        row(f"command to first step: against {BARE}", one, bare, START_GOAL),
        row(f"command to exit, with two steps and a test: against {BARE}", whole, bare, None),
        Row("ddp on 2 to its first step: seconds later than one device", median(two), median(one), later, LATER_GOAL),
        Row("a further job of a sweep, whole: its seconds", job, median(whole), job, LATER_GOAL),
    ]


def train(*overrides: str) -> tuple[list[float], list[float], float]:
    """Run train.py.

    Returns:
        for each job the seconds to its first step, and when it ended; seconds of the whole command.
    """
    with tempfile.TemporaryDirectory() as outputs:
        whole = seconds("src/train.py", *overrides, f"outputs={outputs}")
        files = sorted(Path(outputs).rglob("summary.json"), key=lambda file: file.stat().st_mtime)
        firsts = [summary_of(file.parent)["throughput"]["seconds_to_first_step"] for file in files]
        return firsts, [file.stat().st_mtime for file in files], whole


def seconds(*command: str) -> float:
    """Return how long a Python program runs."""
    began = time.perf_counter()
    program(*command)
    return time.perf_counter() - began


def memory() -> list[Row]:
    """Compare a worker's memory with that of a bare loop that does the same.

    Both train in turn on images of 28 x 28 in memory; ours validates and tests too. The peak is the kernel's (VmHWM).
    The row also has the proportional memory of all processes (PSS), in which shared pages count once. Linux only.
    """
    rows = []
    for model, (batch_size, steps, samples) in MEMORY_CASES.items():
        bare = ["scripts/lab/bench/opponents/bare_loop.py", "--memory", model, *map(str, (batch_size, steps, samples))]
        other, other_total = watch(bare, workers=False)
        for devices in (1, 2):
            with tempfile.TemporaryDirectory() as outputs:
                run = ["src/train.py", f"model={model}", "data=synthetic", f"data.samples={samples}"]
                run += [f"batch_size={batch_size * devices}", f"max_steps={steps}", f"devices={devices}"]
                ours, total = watch([*run, f"outputs={outputs}"], workers=True)
            what = f"{model}{', ddp 2' * (devices > 1)}: a worker's peak resident memory, against a bare loop's"
            totals = f"all processes together, shared pages once: {total:.0f} against {other_total:.0f} MiB"
            rows.append(row(what, [ours], [other], MEMORY_GOAL, unit="MiB", check=totals))
    return rows


def watch(command: Sequence[str], workers: bool) -> tuple[float, float]:
    """Run a program to its end and watch its memory.

    Args:
        workers: watch the children's peaks instead of the program's own.

    Returns:
        MiB at the peak of the largest process, and the largest PSS of all processes together.
    """
    peak, total = 0.0, 0.0
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            with suppress(OSError):  # a process may end meanwhile
                main_pid = str(process.pid)
                listed = Path(f"/proc/{main_pid}/task/{main_pid}/children").read_text().split()
                peak = max([peak, *(read_mib(pid, "status", "VmHWM") for pid in (listed if workers else [main_pid]))])
                total = max(total, sum(read_mib(pid, "smaps_rollup", "Pss") for pid in {*listed, main_pid}))
            time.sleep(0.2)  # not more often: counting shared pages slows the process down
    if process.returncode:
        raise RuntimeError(f"{command[0]}: exit code {process.returncode}")
    return peak, total


def read_mib(pid: str, file: str, name: str) -> float:
    """Return a line of a file in /proc in MiB. Return 0 for a process that has just ended."""
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), 0.0)


def accuracy(data_dir: str, seeds: Sequence[int] = range(5)) -> list[Row]:
    """Measure the seconds from a command to its test accuracy on MNIST.

    Our recipes, as means over seeds, run against the program of pytorch/examples. All use the real commands, one at a
    time, with all cores. The opponent takes some minutes and runs once, in the middle of our runs.
    """
    order = [(name, seed) for seed in seeds for name in RECIPES]
    order.insert(len(order) // 2, (OPPONENT, 0))
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in (*RECIPES, OPPONENT)}
    for name, seed in order:
        one = opponent(data_dir) if name == OPPONENT else recipe(name, seed, data_dir)
        results[name].append(one)
    ((_, other),) = results[OPPONENT]
    rows = []
    for name, (target, goal) in RECIPES.items():
        reached = [accuracy for accuracy, _ in results[name]]
        took = mean(seconds for _, seconds in results[name])
        what = f"{name}, {target:.1%} of MNIST's test images: times as fast as {OPPONENT} to {OPPONENT_TARGET:.1%}"
        accuracies = f"test accuracy {mean(reached):.2%} ({', '.join(f'{value:.2%}' for value in reached)})"
        rows.append(Row(what, took, other, other / took, goal, at_least=True, check=accuracies))
    return rows


def recipe(name: str, seed: int, data_dir: str) -> tuple[float, float]:
    """Return the test accuracy of one run of ours, and the seconds until summary.json had it."""
    with tempfile.TemporaryDirectory() as outputs:
        overrides = [f"experiment={name}", f"seed={seed}", f"data_dir={data_dir}", f"outputs={outputs}", "name=run"]
        began = time.time()
        program("src/train.py", *overrides)
        (folder,) = Path(outputs, "run").iterdir()
        ended = (folder / "summary.json").stat().st_mtime
        return float(summary_of(folder)["metrics"]["test/acc"]), ended - began


def opponent(data_dir: str) -> tuple[float, float]:
    """Return the opponent's test accuracy and seconds. Its clock starts with its first line."""
    output = program("scripts/lab/bench/opponents/examples_mnist.py", data_dir, str(OPPONENT_TARGET))
    reached, seconds = re.findall(r"test/acc ([\d.]+)  ([\d.]+) s", output)[-1]
    return float(reached), float(seconds)
