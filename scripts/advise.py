"""Which layout is fastest on this machine for a model, a data set and a batch size, and why:

    python scripts/advise.py model=resnet18 data=cifar10 batch_size=256
    python scripts/advise.py model=mnist_cnn batch_size=256 verify=all   # prediction and measurement of every layout

It measures steps that send nothing, with 1, 2, 4, ... workers busy at once (they share caches and memory), in a few
sizes of a piece, and the all-reduce of tensors of several sizes. A layout's step is then predicted as its computation
plus, under ddp, a ring all-reduce: latency + 2 (N - 1) / N x bytes / bandwidth (Patarasuk and Yuan, Bandwidth optimal
all-reduce algorithms, 2009). Sending is taken to overlap with nothing. The best are run, which tells how far the
prediction is off. Takes the config of train.py; writes advise.json.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from lockstep import cli, fast, logs
from lockstep.checks import real, whole
from lockstep.config import Config, check, gpu_count
from lockstep.data import DataModule, Splits, open_data
from lockstep.gradients import GradientSum
from lockstep.launch import external_workers, launch
from lockstep.layout import Refusal
from lockstep.loop import StepLoop
from lockstep.memory import MIB, Memory
from lockstep.nonfinite import Watch
from lockstep.summary import versions, write_summary
from lockstep.training import make_module, make_trainer

ACCUMULATE = (1, 2, 4)  # what is offered to each device
BUCKET = 25 * MIB  # what DDP sends at once, after a first one of 1 MiB
SIZES = [1 << bits for bits in range(10, 27, 2)]  # bytes that are all-reduced
WARMUP = 3  # steps
ROUNDS = 2  # in turns, since the machine may slow down and recover


@dataclass
class Choice:
    """One layout. Seconds are of an optimizer step; MiB of one device."""

    strategy: str
    devices: int
    accumulate_grad_batches: int
    compute: float
    all_reduce: float
    mib: float
    measured: float | None = None

    @property
    def predicted(self) -> float:
        return self.compute + self.all_reduce

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to the measurement."""
        return None if self.measured is None else self.predicted / self.measured - 1

    @property
    def best(self) -> float:
        """What is known of its time."""
        return self.measured or self.predicted

    def __str__(self) -> str:
        name = "auto" if self.devices == 1 else self.strategy
        return f"strategy={name} devices={self.devices} accumulate_grad_batches={self.accumulate_grad_batches}"


@dataclass
class Machine:
    """What was measured.

    Attributes:
        compute: seconds of a step that sends nothing, by devices that are busy at once, then by turns of each.
        peak: MiB of a device by samples of a piece.
        all_reduce: `(bytes, seconds)` by devices.
        gradients: bytes of a step's gradient.
    """

    compute: dict[int, dict[int, float]]
    peak: dict[int, float]
    all_reduce: dict[int, list[tuple[int, float]]]
    gradients: int

    def step(self, devices: int, turns: int) -> float:
        """Seconds of a step without sending. Between two measured numbers of turns it is a straight line: each turn
        adds its own overhead to the same samples."""
        return interpolated(self.compute[devices], turns)

    def memory(self, samples: int) -> float | None:
        """MiB of a device for pieces of so many samples; None where they are known not to fit."""
        return None if samples > max(self.peak) else interpolated(self.peak, samples)

    def ring(self, devices: int) -> tuple[float, float]:
        """`(latency in s, bandwidth in bytes/s)` of the ring model, fitted to relative errors."""
        sent = np.array([2 * (devices - 1) / devices * size for size, _ in self.all_reduce[devices]])
        seconds = np.array([took for _, took in self.all_reduce[devices]])
        rows = np.stack([1 / seconds, sent / seconds], axis=1)
        latency, per_byte = np.linalg.lstsq(rows, np.ones(len(seconds)), rcond=None)[0]
        return max(float(latency), 0.0), 1 / max(float(per_byte), 1e-15)

    def send(self, devices: int) -> float:
        """Seconds of a gradient's all-reduce, in DDP's buckets."""
        latency, bandwidth = self.ring(devices)
        buckets = 1 + -(-max(0, self.gradients - MIB) // BUCKET)
        return latency * buckets + 2 * (devices - 1) / devices * self.gradients / bandwidth


def interpolated(points: dict[int, float], at: int) -> float:
    return float(np.interp(at, sorted(points), [points[key] for key in sorted(points)]))


def advise(raw: dict[str, Any], folder: Path) -> None:
    """Measures, predicts, verifies, and answers."""
    started = time.perf_counter()
    verify = raw.pop("verify")
    seconds = real(above=0)("seconds", raw.pop("seconds"))
    assert seconds is not None
    if external_workers() or raw["num_nodes"] != 1:
        raise Refusal("advise measures one machine, without torchrun")
    raw |= {"accumulate_grad_batches": None, "pieces": None, "devices": 1, "strategy": {"name": "auto"}}
    config = check(raw)
    if (load := os.getloadavg()[0]) > cores() / 4:
        print(f"other programs are busy here (load {load:.1f} on {cores()} cores): expect errors", file=sys.stderr)
    splits = open_data(config.data, config.data_dir, config.seed)
    machine = Machine({}, {}, {}, 0)
    offered = offers(raw["batch_size"], config.layout.accelerator)
    for devices in sorted({devices for devices, _ in offered}):
        turns = [accumulate for n, accumulate in offered if n == devices]
        if devices == 1:  # dp's pieces are computed one after the other, on a CPU
            turns.append(max(n * accumulate for n, accumulate in offered))
        asked = check({**raw, **layout("auto", devices, turns[0])})
        print(f"measuring {devices} at once ...", file=sys.stderr)
        times, peaks, sends, size = launch(
            compute, asked, splits, folder, sorted({turns[0], turns[-1]}), seconds, layout=asked.layout
        )
        machine.compute[devices], machine.all_reduce[devices], machine.gradients = times, sends, size
        machine.peak |= peaks
    choices = sorted(predict(raw["batch_size"], offered, config, machine), key=lambda choice: choice.predicted)
    if not choices:
        raise Refusal(f"batch_size={raw['batch_size']}: no layout of this machine holds it")
    wanted = len(choices) if verify == "all" else whole(1)("verify", verify)
    for choice in choices[:wanted]:
        print(f"running {choice} ...", file=sys.stderr)
        asked = check({**raw, **layout(choice.strategy, choice.devices, choice.accumulate_grad_batches)})
        choice.measured = launch(run, asked, splits, folder, seconds, layout=asked.layout)
    console = Console()
    if not console.is_terminal:
        console.width = 120
    console.print(table(choices, config))
    answer = conclusion(choices, machine, config)
    print(answer)
    report = {
        "answer": answer,
        "choices": [asdict(choice) | {"predicted": choice.predicted, "error": choice.error} for choice in choices],
        "compute": machine.compute,
        "peak_mib": machine.peak,
        "all_reduce": machine.all_reduce,
        "ring": {n: machine.ring(n) for n in machine.all_reduce if n > 1},
        "gradient_bytes": machine.gradients,
        "seconds": time.perf_counter() - started,
        "config": raw,
        "versions": versions(),
    }
    write_summary(folder / "advise.json", report)


def layout(strategy: str, devices: int, accumulate: int) -> dict[str, Any]:
    """The keys of a config that choose a layout."""
    name = "auto" if devices == 1 else "ddp" if strategy == "auto" else strategy
    return {"strategy": {"name": name}, "devices": devices, "accumulate_grad_batches": accumulate}


def offers(batch_size: int, accelerator: str) -> list[tuple[int, int]]:
    """`(devices, turns of each)` whose pieces are equal: 1, 2, 4, ... devices and all of them."""
    most = cores() if accelerator == "cpu" else gpu_count()
    counts = sorted({most} | {1 << bit for bit in range(most.bit_length())})
    return [(n, a) for n, a in itertools.product(counts, ACCUMULATE) if batch_size % (n * a) == 0]


def cores() -> int:
    """Of the CPU, for this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def predict(batch_size: int, offered: list[tuple[int, int]], config: Config, machine: Machine) -> list[Choice]:
    """Every layout that fits the memory."""
    gpu = config.layout.accelerator == "gpu"
    found = []
    for devices, accumulate in offered:
        mib = machine.memory(batch_size // (devices * accumulate))
        if mib is None or mib > (config.memory_budget or float("inf")):
            continue
        busy = machine.step(devices, accumulate)
        if devices == 1:
            found.append(Choice("single", 1, accumulate, busy, 0.0, mib))
            continue
        found.append(Choice("ddp", devices, accumulate, busy, machine.send(devices), mib))
        # dp is one process. A CPU computes its logical devices one after the other; GPUs compute at once, and the first
        # one sends its weights to each of the others in every turn, and gets their gradients.
        alone = busy if gpu else machine.step(1, devices * accumulate)
        copies = 2 * (devices - 1) * accumulate * machine.gradients / machine.ring(devices)[1] if gpu else 0.0
        found.append(Choice("dp", devices, accumulate, alone, copies, mib))
    return found


# --- in the workers ---


class Silent(GradientSum):
    """Nothing is sent."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, 1)

    def turn(self, number: int, share: Any) -> AbstractContextManager[Any]:
        return self.strategy.no_sync()


def compute(
    config: Config, splits: Splits, folder: Path, turns: list[int], seconds: float
) -> tuple[dict[int, float], dict[int, float], list[tuple[int, float]], int]:
    """Seconds of a step by number of turns, peak MiB by samples of a piece, `(bytes, seconds)` of all-reduces, and the
    bytes of a gradient. All workers compute at once; the slowest one counts, as it does in a step."""
    begin(config, folder)
    first: dict[int, float] = {}
    took: dict[int, list[float]] = {}
    peaks: dict[int, float] = {}
    for turn in range(1 + ROUNDS):
        for accumulate in turns if turn == 0 else first:
            pieces = config.layout.devices * accumulate
            asked = replace(config, layout=replace(config.layout, pieces=pieces))
            if turn:
                count = steps(first[accumulate], seconds / ROUNDS)
                took[accumulate] = took.get(accumulate, []) + block(asked, splits, folder, count)
                continue
            memory = Memory(1, float("inf"))
            try:
                first[accumulate] = slowest(block(asked, splits, folder, WARMUP + 3, memory))
            except Refusal:  # what does not fit is not offered
                continue
            peaks[config.batch_size // pieces] = (memory.peak or 0) / MIB
    times = {accumulate: slowest(found) for accumulate, found in took.items()}
    gradient = sum(p.numel() * p.element_size() for p in make_module(config, splits).parameters() if p.requires_grad)
    return times, peaks, all_reduces(config, seconds) if config.layout.devices > 1 else [], gradient


def run(config: Config, splits: Splits, folder: Path, seconds: float) -> float:
    """Seconds of a step of the layout as it is."""
    begin(config, folder)
    first = slowest(block(config, splits, folder, WARMUP + 3, silent=False))
    count = steps(first, seconds / ROUNDS)
    return slowest([took for _ in range(ROUNDS) for took in block(config, splits, folder, count, silent=False)])


def begin(config: Config, folder: Path) -> None:
    logs.configure(folder, 1)
    fast.set_up(config.layout, config.threads, config.allocator)


class Clock(pl.Callback):
    """Seconds at which each optimizer step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self.ends.append(time.perf_counter())


def block(
    config: Config, splits: Splits, folder: Path, count: int, memory: Memory | None = None, silent: bool = True
) -> list[float]:
    """Seconds of each step, of `count` steps in a Trainer of their own; the first ones are left out."""
    data = DataModule(splits, config.layout, seed=config.seed, num_workers=config.num_workers)
    data.process = dist.get_rank() if dist.is_initialized() else 0
    clock = Clock()
    asked = replace(config, max_epochs=1000, max_steps=count, val_every=None, logger={}, callbacks={})
    trainer = make_trainer(asked, folder, [clock])
    trainer.limit_val_batches = 0
    if silent:
        gradients, watch = Silent(trainer.strategy), Watch(config.nonfinite, 1)
        trainer.fit_loop.epoch_loop = StepLoop(trainer, gradients, watch, config.seed, memory)
    trainer.fit(make_module(config, splits), datamodule=data)
    return [end - start for start, end in itertools.pairwise(clock.ends[WARMUP - 1 :])]


def steps(seconds_of_one: float, seconds: float) -> int:
    return WARMUP + max(5, min(200, int(seconds / seconds_of_one)))


def slowest(seconds: list[float]) -> float:
    """What a step takes, of the worker that is slowest. The lower quartile: what else runs on the machine only adds."""
    quartile = torch.quantile(torch.tensor(seconds, dtype=torch.float64), 0.25)
    if dist.is_initialized():
        dist.all_reduce(quartile, dist.ReduceOp.MAX)
    return float(quartile)


def all_reduces(config: Config, seconds: float) -> list[tuple[int, float]]:
    """Seconds of an all-reduce by bytes."""
    gpu = config.layout.accelerator == "gpu"
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    found = []
    for size in SIZES:
        tensor = torch.zeros(size // 4, device=device)
        took: list[float] = []
        began = time.perf_counter()
        again = True
        while again:
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            if gpu:
                torch.cuda.synchronize(device)
            took.append(time.perf_counter() - start)
            again = bool(slowest([float(len(took) < 5 or time.perf_counter() - began < seconds / len(SIZES))]))
        found.append((size, slowest(took[2:])))
    return found


# --- the answer ---


def table(choices: list[Choice], config: Config) -> Table:
    """Prediction and measurement side by side."""
    shown = Table(
        "layout", "devices", "accumulated", "piece", "MiB/device", "compute", "all-reduce", "predicted", "measured",
        "error", box=box.SIMPLE_HEAD, caption="ms a step; in order of the prediction",
    )  # fmt: skip
    for choice in choices:
        times = [f"{1000 * t:.1f}" for t in (choice.compute, choice.all_reduce, choice.predicted)]
        measured = "" if choice.measured is None else f"{1000 * choice.measured:.1f}"
        error = "" if choice.error is None else f"{choice.error:+.0%}"
        piece = str(config.batch_size // (choice.devices * choice.accumulate_grad_batches))
        sizes = [str(choice.devices), str(choice.accumulate_grad_batches), piece, f"{choice.mib:.0f}"]
        shown.add_row(choice.strategy, *sizes, *times, measured, error)
    return shown


def conclusion(choices: list[Choice], machine: Machine, config: Config) -> str:
    """One paragraph: which layout, and why."""
    best = min((choice for choice in choices if choice.measured), key=lambda choice: choice.best)
    errors = [abs(choice.error) for choice in choices if choice.error is not None]
    one = min((choice for choice in choices if choice.devices == 1), key=lambda choice: choice.best)
    said = [
        f"Use {best}: a step of {config.batch_size} samples takes {1000 * best.best:.1f} ms (measured; predicted "
        f"{1000 * best.predicted:.1f})."
    ]
    other = "measured" if one.measured else "predicted"
    if best.devices > 1:
        said.append(
            f"That is {one.best / best.best:.2f} times as fast as one device ({1000 * one.best:.1f} ms, {other})."
        )
    for n in sorted({choice.devices for choice in choices} - {1}):
        latency, bandwidth = machine.ring(n)
        said.append(
            f"{n} workers that compute at once take {1000 * machine.step(n, min(machine.compute[n])):.1f} ms for their "
            f"parts, and {1000 * machine.send(n):.1f} ms to all-reduce {machine.gradients / MIB:.1f} MiB of gradients "
            f"({1e6 * latency:.0f} us + bytes sent at {bandwidth / 1e9:.2f} GB/s)."
        )
    if any(choice.strategy == "dp" for choice in choices):
        dp = min((choice for choice in choices if choice.strategy == "dp"), key=lambda choice: choice.best)
        why = "one process, which copies weights and gradients in every turn"
        if config.layout.accelerator == "cpu":
            why = "one process, in which a CPU computes the devices' pieces one after the other"
        said.append(f"dp is {why}: {1000 * dp.best:.1f} ms at best.")
    same = [c for c in choices if (c.strategy, c.devices) == (best.strategy, best.devices)]
    more = max(same, key=lambda choice: choice.accumulate_grad_batches)
    if more is not best:
        longer = more.predicted / best.predicted - 1
        said.append(
            f"Accumulating {more.accumulate_grad_batches} pieces on each device is predicted to take {longer:+.0%} "
            f"time, and {more.mib:.0f} instead of {best.mib:.0f} MiB."
        )
    said.append(
        f"Predictions were off by {max(errors):.0%} at most and {median(errors):.0%} in the middle, of "
        f"{len(errors)} run."
    )
    return " ".join(said)


if __name__ == "__main__":
    cli.command(advise, "advise")
