"""All ranks hold the same weights: checked at the start and before each checkpoint; a rank that differs is named."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class Diverged(Exception):
    """A rank's weights are not those of rank zero."""


class ReplicaConsistencyCheck(pl.Callback):
    """Compares a checksum of the parameters' bits over all ranks, with one all-gather of a number."""

    def _compare(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.world_size == 1:
            return
        sums = trainer.strategy.all_gather(checksum(pl_module)).flatten().tolist()
        others = [str(rank) for rank, found in enumerate(sums) if found != sums[0]]
        if others:
            ranks = f"rank{'s' * (len(others) > 1)} {', '.join(others)}"
            raise Diverged(f"after step {trainer.global_step} the weights of {ranks} are not those of rank 0")

    on_train_start = on_save_checkpoint = _compare


def checksum(module: torch.nn.Module) -> torch.Tensor:
    """A sum over the bits of all parameters, int64: elements weigh 1, tensors by their position."""
    total = torch.zeros((), dtype=torch.int64, device=next(module.parameters()).device)
    for position, parameter in enumerate(module.parameters()):
        bits = parameter.detach().contiguous().view(-1).view(INTEGERS[parameter.element_size()])
        total += bits.sum(dtype=torch.int64) * (2 * position + 1)
    return total
