"""What `exact=true` costs a step:  python scripts/exact_cost.py model=resnet18 data=synthetic batch_size=256

Takes train.py's config. Both sides run in the same workers in turns, a block of steps each, with 8 pieces on one device
and under ddp on two; the ratio is that of the medians of all their steps.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import itertools

import lightning.pytorch as pl
import torch

from lockstep import cli, fast, logs
from lockstep.config import Config, check
from lockstep.data import DataModule, Splits, open_data
from lockstep.launch import launch
from lockstep.summary import write_summary
from lockstep.training import make_module, make_trainer

ROUNDS, STEPS, WARMUP = 10, 8, 3  # blocks of each side, optimizer steps of a block, of which the first don't count


class Clock(pl.Callback):
    """Seconds of each optimizer step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self.ends.append(time.perf_counter())


def cost(raw: dict[str, Any], folder: Path) -> None:
    """Measures, prints a line for each layout, and writes exact_cost.json."""
    splits = open_data(raw["data"], raw["data_dir"])
    found = {}
    for strategy, devices in (("single", 1), ("ddp", 2)):
        layout = {"strategy": {"name": "auto" if devices == 1 else strategy}, "devices": devices, "pieces": 8}
        config = check({**raw, **layout, "threads": 1, "max_steps": STEPS, "accumulate_grad_batches": None})
        plain, exact = launch(measure, config, splits, folder, layout=config.layout)
        ratio = median(exact) / median(plain)
        name = f"{strategy}, {devices} device{'s' * (devices > 1)}, {config.layout.describe()}"
        print(
            f"{name}: exact / default {ratio:.3f}  ({1000 * median(exact):.1f} / {1000 * median(plain):.1f} ms a step)"
        )
        found[f"{strategy}_{devices}"] = {"ratio": ratio, "exact": exact, "default": plain}
    write_summary(folder / "exact_cost.json", found)


def measure(config: Config, splits: Splits, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds of the counted steps, by default and exact."""
    logs.configure(folder, 1)
    fast.keep_freed_memory()
    fast.set_threads(config.layout, config.threads)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for block in range(2 * ROUNDS):
        exact = block % 2 == 1
        asked = replace(config, exact=exact, layout=replace(config.layout, exact=exact), logger={}, callbacks={})
        data = DataModule(splits, asked.layout, seed=config.seed, num_workers=0)
        data.process = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        clock = Clock()
        trainer = make_trainer(asked, folder, [clock])
        trainer.limit_val_batches = 0
        trainer.fit(make_module(asked, splits), datamodule=data)
        counted = clock.ends[WARMUP - 1 :]
        seconds[exact] += [end - start for start, end in itertools.pairwise(counted)]
    return seconds[False], seconds[True]


if __name__ == "__main__":
    cli.command(cost, "train")
