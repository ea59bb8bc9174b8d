"""Deliberate mistakes for controls: a comparison that does not see them proves nothing."""

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch


class Fault(pl.Callback):
    """Makes a mistake in each step.

    Args:
        pieces: number of pieces of a step.
        batch_size: samples of a full step.
        fault: the mistake:

            - `faster`: the optimizer takes each step with a learning rate that is 1 % larger.
            - `permuted`: samples come in the order of another seed; weights and dropout keep theirs.
            - `summed`: the pieces' gradients are added, not averaged.
            - `windowed`: a short step's samples count as in a full step, as in Lightning's accumulation (#19987).
    """

    def __init__(self, pieces: int, batch_size: int, fault: str) -> None:
        self.pieces, self.batch_size, self.fault = pieces, batch_size, fault
        self.samples = batch_size  # in the current step

    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        if self.fault == "permuted" and stage == "fit":
            order = trainer.datamodule.order
            trainer.datamodule.order = replace(order, seed=order.seed + 1)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.samples = batch.samples

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self.fault == "faster":  # here, because a module may have no argument for it
            _take_one_step_faster(optimizer)
        factor = {"summed": float(self.pieces), "windowed": self.samples / self.batch_size}.get(self.fault, 1.0)
        if factor != 1:
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    trainer.strategy.local_part(parameter.grad).mul_(factor)  # type: ignore[attr-defined]  # ours


def _take_one_step_faster(optimizer: torch.optim.Optimizer) -> None:
    """Make the next step with a learning rate that is 1 % larger. The schedule then finds the right one."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 1.01

    def restore(*_: Any) -> None:
        handle.remove()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    handle = optimizer.register_step_post_hook(restore)
