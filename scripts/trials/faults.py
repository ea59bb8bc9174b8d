"""What a trial does wrong on purpose: the controls, which a comparison must see, and the yardstick of rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from trials.distance import roundoff

from lockstep.loading import DataModule


def _weights(trainer: pl.Trainer, weight: Any) -> None:
    """Replaces what a micro-batch's mean loss counts for, `weight(micro_batch, world_size)`."""
    gradients = trainer.fit_loop.epoch_loop.passes.gradients  # type: ignore[attr-defined]
    gradients.weight = lambda micro_batch, step_batch: weight(micro_batch, gradients.world_size)


def rounding(trainer: pl.Trainer, module: pl.LightningModule, data: DataModule, seed: int) -> None:
    """Every step's gradient is off by as many roundings as it has pieces, up or down: the yardstick. Adding pieces in
    another order does no more, and usually less."""
    gradients = trainer.fit_loop.epoch_loop.passes.gradients  # type: ignore[attr-defined]
    generator, finish = torch.Generator().manual_seed(seed), gradients.finish
    size = 2 * roundoff(str(trainer.precision)) * data.layout.pieces

    def rounded(step_batch: Any) -> None:
        finish(step_batch)
        for gradient in (p.grad for p in module.parameters() if p.grad is not None):
            signs = torch.randint(0, 2, gradient.shape, generator=generator).to(gradient) * 2 - 1
            partial = gradient.abs().clamp_min(gradient.square().mean().sqrt())  # sums on the way may be larger
            gradient.add_(signs * partial, alpha=size)

    gradients.finish = rounded


def permuted(trainer: pl.Trainer, module: pl.LightningModule, data: DataModule) -> None:
    """The order of another seed; weights and dropout keep theirs."""
    data.order = replace(data.order, seed=data.order.seed + 1)


def summed(trainer: pl.Trainer, module: pl.LightningModule, data: DataModule) -> None:
    """The pieces' gradients are added, not averaged."""
    _weights(trainer, lambda micro_batch, world_size: float(len(micro_batch.pieces) * world_size))


def windowed(trainer: pl.Trainer, module: pl.LightningModule, data: DataModule) -> None:
    """Every piece counts as in a full step, the short tail's too: accumulation as Lightning does it (#19987)."""
    pieces = data.layout.pieces
    _weights(trainer, lambda micro_batch, world_size: len(micro_batch.pieces) * world_size / pieces)


FAULTS: dict[str, Any] = {fault.__name__: fault for fault in (permuted, summed, windowed)}
YARDSTICKS = [f"rounding {seed}" for seed in (1, 2, 3)]  # which ReLU flips first is chance: the largest of three
FAULTS |= {name: partial(rounding, seed=seed) for seed, name in enumerate(YARDSTICKS, 1)}
