"""`strategy.shares=auto`: measures how fast each device computes a piece, and deals pieces accordingly."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lockstep.arithmetic.layout import Layout, split
from lockstep.launch import logs
from lockstep.launch.agent import launch
from lockstep.loading import Splits
from lockstep.run.build import make_module, make_trial
from lockstep.run.config import Config

STEPS = 6  # the first two warm up


def balanced(config: Config, splits: Splits, folder: Path) -> Config:
    """The config with measured shares: a few steps in workers of their own, which leave nothing behind."""
    seconds = launch(measure, config, splits, folder, layout=config.layout, rdzv_endpoint=config.rdzv_endpoint)
    shares = tuple(1 / second for second in seconds)
    layout = replace(config.layout, shares=shares)
    counts = split(layout.pieces, layout.num_devices, shares)
    times = ", ".join(f"{1000 * second:.1f}" for second in seconds)
    print(
        f"a piece takes {times} ms on the {layout.num_devices} devices: {' + '.join(map(str, counts))} pieces",
        file=sys.stderr,
    )
    return replace(config, layout=layout)


@logs.quiet()
def measure(config: Config, splits: Splits, folder: Path) -> list[float]:
    """Seconds of one piece on each device, in rank order. Every worker of the layout calls it."""
    layout: Layout = config.layout
    trainer, data = make_trial(config, splits, folder, STEPS)
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    loop.timed = {}
    if layout.strategy == "dp":
        trainer.strategy.seconds = {}  # type: ignore[attr-defined]
    trainer.fit(make_module(config, splits), datamodule=data)
    own = {device: median(times[len(times) // 3 :]) for device, times in loop.timed.items()}
    if layout.world_size == 1:
        return [own[device] for device in range(layout.num_devices)]
    row = torch.tensor([own[dist.get_rank()]], dtype=torch.float64)
    rows = [torch.zeros_like(row) for _ in range(layout.world_size)]
    dist.all_gather(rows, row)
    return [float(row) for row in rows]
