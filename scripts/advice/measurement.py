"""What is measured, in the workers: steps that send nothing, steps as they are, all-reduces."""

from __future__ import annotations

import itertools
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import DummyLogger

from lockstep.arithmetic.layout import Refusal
from lockstep.launch import logs
from lockstep.loading import DataModule, Splits
from lockstep.run import fast
from lockstep.run.build import compile_module, make_module, make_trainer
from lockstep.run.config import Config
from lockstep.step.finite import FiniteGradientCheck
from lockstep.step.gradients import GradientSum
from lockstep.step.memory import MIB, Memory
from lockstep.step.passes import StepPasses

SIZES = [1 << bits for bits in range(10, 27, 2)]  # bytes that are all-reduced
WARMUP = 3  # steps
ROUNDS = 2  # in turns, since the machine may slow down and recover


class Silent(GradientSum):
    """Nothing is sent."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, 1)

    def micro_batch(self, number: int, step_batch: Any) -> AbstractContextManager[Any]:
        return self.strategy.no_sync()


def compute(
    config: Config, splits: Splits, folder: Path, micro_batches: list[int], seconds: float
) -> tuple[dict[int, float], dict[int, float], list[tuple[int, float]], int]:
    """Seconds of a step by number of turns, peak MiB by samples of a piece, `(bytes, seconds)` of all-reduces, and the
    bytes of a gradient. All workers compute at once; the slowest one counts, as it does in a step."""
    begin(config, folder)
    first: dict[int, float] = {}
    took: dict[int, list[float]] = {}
    peaks: dict[int, float] = {}
    for micro_batch in range(1 + ROUNDS):
        for accumulate in micro_batches if micro_batch == 0 else first:
            pieces = config.layout.devices * accumulate
            asked = replace(config, layout=replace(config.layout, pieces=pieces))
            if micro_batch:
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
    trainer.loggers = [DummyLogger()]  # for a module that draws by itself
    trainer.limit_val_batches = 0
    if silent:
        gradients, watch = Silent(trainer.strategy), FiniteGradientCheck(config.nonfinite, 1)
        loop: Any = trainer.fit_loop.epoch_loop
        loop.passes = StepPasses(gradients, watch, config.seed)
    module = make_module(config, splits)
    compile_module(config, module)
    trainer.fit(module, datamodule=data)
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
