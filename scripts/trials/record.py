"""Writes a trial down, to the bit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

PROBES = 10_000  # weights that are looked at after every step; all are compared at the end
Tensors = dict[str, NDArray[Any]]


class Record(pl.Callback):
    """Writes a trial down, through hooks and the `StepBatch`s that the loader yields."""

    def __init__(self) -> None:
        self.ids: dict[tuple[int, int], str] = {}  # (step, piece) -> hash of its sample ids
        self.losses: list[tuple[float, int]] = []  # sum over this process's samples, samples of the step
        self.probes: list[NDArray[Any]] = []
        self.gradients: Tensors = {}
        self.samples = ""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for micro_batch in batch.micro_batches:
            starts = np.cumsum([0, *micro_batch.sizes])
            for piece, start, stop in zip(micro_batch.pieces, starts, starts[1:], strict=False):
                self.ids[batch.step, piece] = hashlib.sha256(
                    np.asarray(micro_batch.ids[start:stop]).tobytes()
                ).hexdigest()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if trainer.global_step + 1 == trainer.max_steps:
            self.gradients = {name: _numpy(p.grad) for name, p in pl_module.named_parameters() if p.grad is not None}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        own = sum(sum(micro_batch.sizes) for micro_batch in batch.micro_batches)
        self.losses.append((float(outputs["loss"]) * own, batch.samples))
        flat = [_numpy(p).reshape(-1) for p in pl_module.parameters()]
        every = max(1, sum(map(len, flat)) // PROBES)
        self.probes.append(np.concatenate([part[::every] for part in flat]))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What each process knows of ids and losses, put together."""
        known: list[Any] = [(self.ids, [loss for loss, _ in self.losses])]
        if dist.is_initialized():
            known = [None] * dist.get_world_size()
            dist.all_gather_object(known, (self.ids, [loss for loss, _ in self.losses]))
        ids = {key: value for found, _ in known for key, value in found.items()}
        self.samples = hashlib.sha256(repr(sorted(ids.items())).encode()).hexdigest()
        self.losses = [
            (sum(parts), samples)
            for parts, (_, samples) in zip(zip(*(part for _, part in known), strict=True), self.losses, strict=True)
        ]

    def save(self, path: Path, module: nn.Module) -> None:
        """Arrays only, under `kind/name`."""
        arrays = {f"weights/{name}": _numpy(p) for name, p in module.named_parameters()}
        state = module.state_dict()
        arrays |= {
            f"buffers/{name}": _numpy(b)
            for name, b in module.named_buffers()
            if name in state and b.is_floating_point()
        }
        arrays |= {f"gradients/{name}": gradient for name, gradient in self.gradients.items()}
        arrays["curves/losses"] = np.array([loss / samples for loss, samples in self.losses])
        arrays["curves/probes"] = np.stack(self.probes)
        np.savez(path, **arrays)  # type: ignore[arg-type]


def _numpy(tensor: Tensor) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy().copy()


def sensitive(module: nn.Module) -> list[str]:
    """The kinds of layers whose result depends on how a step is cut into pieces."""
    found = set()
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            found.add("BatchNorm")
        elif isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p:
            found.add("dropout")
    return sorted(found)
