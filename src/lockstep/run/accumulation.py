"""`accumulate_grad_batches=auto`: tries before training into how many pieces a step must be cut to fit the memory."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.arithmetic.layout import Layout
from lockstep.callbacks import checkpoint_io
from lockstep.callbacks.found_pieces import kept
from lockstep.launch import logs
from lockstep.launch.agent import launch
from lockstep.launch.environment import environment
from lockstep.loading import Splits
from lockstep.run.build import make_module, make_trial
from lockstep.run.config import Config
from lockstep.step.memory import MIB

STEPS = 3  # the first one has no optimizer state yet


def fitted(config: Config, splits: Splits, folder: Path) -> Config:
    """The config with the fewest pieces that fit: those of the checkpoint that it resumes, else of a few steps in
    workers of their own, which leave nothing behind.

    Raises:
        Refusal: not even pieces of one sample fit.
    """
    last = folder / "checkpoints" / "last.ckpt"
    if last.exists() and (layout := kept(config, checkpoint_io.load(last))):
        return replace(config, layout=layout)
    layout, peak = launch(
        measure,
        config,
        splits,
        folder,
        layout=config.layout,
        rdzv_endpoint=config.rdzv_endpoint,
        hang_timeout=config.hang_timeout,
    )
    if environment().rank == 0:
        used = "" if peak is None else f" in {peak / MIB:.0f} MiB of each device"
        limit = "" if config.memory_budget is None else f", memory_budget={config.memory_budget:g}"
        print(f"accumulate_grad_batches={layout.accumulate} fits{used}{limit}", file=sys.stderr)
    return replace(config, layout=layout)


@logs.quiet()
def measure(config: Config, splits: Splits, folder: Path) -> tuple[Layout, float | None]:
    """The layout with the fewest pieces that fit, and the largest peak of a device in bytes, where it is known. Every
    worker of the layout calls it, and gets the same."""
    trainer, data = make_trial(config, splits, folder, STEPS)
    memory: Any = trainer.fit_loop.epoch_loop.automatic_optimization.memory  # type: ignore[attr-defined]
    memory.repeats = True  # exact too: no step counts yet
    trainer.fit(make_module(config, splits), datamodule=data)
    peak, devices = memory.peak, config.layout.devices if config.layout.strategy == "dp" else 1
    if peak is not None and config.layout.accelerator == "cpu":
        peak /= devices
    if peak is not None and config.layout.world_size > 1:
        largest = torch.tensor([peak], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        peak = float(largest)
    layout = data.layout
    if config.layout.accelerator == "gpu":  # under torchrun this process goes on
        del data, trainer, memory
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return layout, peak
