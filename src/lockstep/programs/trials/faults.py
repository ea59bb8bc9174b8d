"""Deliberate mistakes for controls: a comparison that does not see them proves nothing."""

import os
import signal
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from lockstep.callbacks import EMA

# Controls in which a rank uses its own number or samples instead of the step's.
BY_RANK = ("decayed", "weighted", "seeded")
KILLED = "killed"


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
            - `decayed`: an average decays faster on more devices, as in torchvision's reference.
            - `weighted`: class weights are normalised over a rank's samples.
            - `seeded`: random numbers in a piece depend on the rank too.
            - `killed`: the process is killed half-way, in the middle of an epoch.
    """

    def __init__(self, pieces: int, batch_size: int, fault: str) -> None:
        self.pieces, self.batch_size, self.fault = pieces, batch_size, fault
        self.samples = batch_size  # in the current step

    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        if self.fault == "permuted" and stage == "fit":
            order = trainer.datamodule.order
            trainer.datamodule.order = replace(order, seed=order.seed + 1)
        elif self.fault in BY_RANK and stage == "fit":
            _apply_by_rank(trainer, self.fault)

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

    def on_train_batch_end(
        self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.fault == KILLED and trainer.is_last_batch and 2 * trainer.global_step >= trainer.max_steps:
            os.kill(os.getpid(), signal.SIGKILL)  # before this step is saved, so that the run resumes inside the epoch


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


def _apply_by_rank(trainer: Any, fault: str) -> None:
    data = trainer.datamodule
    if fault == "decayed":
        for callback in trainer.callbacks:
            if isinstance(callback, EMA):
                callback.decay = 1 - (1 - callback.decay) * data.layout.num_devices
    elif fault == "weighted":
        labels = data.splits.train_labels()
        data.labels_of_step = lambda batch: labels[np.concatenate([each.ids for each in batch.micro_batches])]
    else:
        trainer.fit_loop.epoch_loop.passes.seed += trainer.global_rank
