"""Record a trial to the bit, and make deliberate mistakes for controls."""

import hashlib
import os
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from lockstep.callbacks import EMA

PROBES = 10_000  # weights that are compared after every step; at the end all are
UNIT_ROUNDOFF = {"64": 2.0**-53, "32": 2.0**-24, "16": 2.0**-11, "bf16": 2.0**-8}  # of the weights' type
# Controls in which a rank uses its own number or samples instead of the step's.
BY_RANK = ("decayed", "weighted", "seeded")
KILLED = "killed"
YARDSTICKS = ("rounding 1", "rounding 2", "rounding 3")  # the largest of three counts: which ReLU flips first is random
# A gradient is rounding only below so many roundings of the largest gradient (the RMS of a tensor); at most this share.
MOST_ROUNDINGS, MOST_ROUNDING_SHARE = 1024, 1e-3
FILE = "record.npz"


class Record(pl.Callback):
    """Write `record.npz` into the trial's folder when training ends.

    Args:
        pieces: number of pieces of a step.
        batch_size: samples of a full step.
        fault: the deliberate mistake:

            - `faster`: the optimizer takes each step with a learning rate that is 1 % larger.
            - `permuted`: samples come in the order of another seed; weights and dropout keep theirs.
            - `summed`: the pieces' gradients are added, not averaged.
            - `windowed`: a short step's samples count as in a full step, as in Lightning's accumulation (#19987).
            - `decayed`: an average decays faster on more devices, as in torchvision's reference.
            - `weighted`: class weights are normalised over a rank's samples.
            - `seeded`: random numbers in a piece depend on the rank too.
            - `killed`: the process is killed half-way, in the middle of an epoch.
            - `rounding <seed>`: every gradient is off by as many roundings as a step has pieces. Adding pieces in
              another order makes at most this error, and usually a smaller one.
    """

    def __init__(self, pieces: int, batch_size: int, fault: str | None = None) -> None:
        self.pieces, self.batch_size, self.fault = pieces, batch_size, fault
        self.generator = torch.Generator()
        if fault in YARDSTICKS:
            self.generator.manual_seed(int(fault.split()[1]))
        self.samples = batch_size  # in the current step
        self.ids: dict[tuple[int, int], str] = {}  # (step, piece) -> hash of its sample ids
        self.losses: list[tuple[float, int]] = []  # sum over this process's samples, samples of the step
        self.probes: list[NDArray[Any]] = []
        self.gradients: dict[str, NDArray[Any]] = {}
        self.rounding: dict[str, Tensor] = {}  # elements whose gradient was only rounding at some step, by parameter

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
        for micro_batch in batch.micro_batches:
            self.ids[batch.step, micro_batch.piece] = hashlib.sha256(micro_batch.ids.tobytes()).hexdigest()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self.fault == "faster":  # here, because a module may have no argument for it
            _take_one_step_faster(optimizer)
        strategy: Any = trainer.strategy
        named = {name: strategy.local_part(p.grad) for name, p in pl_module.named_parameters() if p.grad is not None}
        limit = rounding_limit(named.values(), str(trainer.precision))
        for name, gradient in named.items():
            # A zero is one on every layout: nothing was added.
            tiny = ((gradient.detach().abs() <= limit) & (gradient.detach() != 0)).to(torch.uint8)
            self.rounding[name] = torch.maximum(tiny, self.rounding.get(name, tiny))
            if self.fault == "summed":
                gradient.mul_(self.pieces)
            elif self.fault == "windowed":
                gradient.mul_(self.samples / self.batch_size)
            elif self.fault in YARDSTICKS:
                signs = torch.randint(0, 2, gradient.shape, generator=self.generator).to(gradient) * 2 - 1
                gradient.mul_(torch.where(tiny.bool(), signs, 1))  # rounding has any sign, and AdamW sees only that
                # partial sums may be larger than the total
                partial = gradient.abs().clamp_min(gradient.square().mean().sqrt())
                gradient.add_(signs * partial, alpha=2 * roundoff(str(trainer.precision)) * self.pieces)
        if trainer.global_step + 1 == trainer.max_steps:
            self.gradients = {name: _numpy(gradient) for name, gradient in strategy.gather_dicts(named).items()}
            self.rounding = strategy.gather_dicts(self.rounding)

    def on_train_batch_end(
        self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        local = batch.num_local_samples  # may be 0 in a short step
        if trainer.datamodule.layout.replicas == 1 and not trainer.is_global_zero:
            local = 0  # the stages of a pipeline share rank zero's samples
        loss = float(outputs["loss"]) * float(outputs.get("weight", 1)) * local if local else 0.0
        self.losses.append((loss, batch.weight or batch.samples))
        state = trainer.strategy.lightning_module_state_dict()
        flat = [_numpy(state[name]).reshape(-1) for name, _ in pl_module.named_parameters()]
        every = max(1, sum(map(len, flat)) // PROBES)
        self.probes.append(np.concatenate([part[::every] for part in flat]))
        if self.fault == KILLED and trainer.is_last_batch and 2 * trainer.global_step >= trainer.max_steps:
            os.kill(os.getpid(), signal.SIGKILL)  # before this step is saved, so that the run resumes inside the epoch

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather the ids and losses of all processes, and save arrays under `kind/name`."""
        local = self.ids, [loss for loss, _ in self.losses]
        known: list[Any] = [local]
        if dist.is_initialized():
            known = [None] * dist.get_world_size()
            dist.all_gather_object(known, local)
        state = trainer.strategy.lightning_module_state_dict()
        if not trainer.is_global_zero:
            return
        ids = {key: value for part, _ in known for key, value in part.items()}
        losses = np.sum([losses for _, losses in known], axis=0) / [samples for _, samples in self.losses]
        buffers = {n: state[n] for n, b in pl_module.named_buffers() if n in state and b.is_floating_point()}
        arrays: dict[str, Any] = {f"weights/{name}": _numpy(state[name]) for name, _ in pl_module.named_parameters()}
        arrays |= {f"buffers/{name}": _numpy(buffer) for name, buffer in buffers.items()}
        arrays |= {f"gradients/{name}": gradient for name, gradient in self.gradients.items()}
        rounding = {
            name: self.rounding[name].cpu().numpy() > 0 if name in self.rounding else np.zeros(tuple(each.shape), bool)
            for name, each in pl_module.named_parameters()
        }
        arrays |= {f"rounding/{name}": each for name, each in rounding.items()}
        every = max(1, sum(each.size for each in rounding.values()) // PROBES)
        arrays["about/rounding_probes"] = np.concatenate([each.reshape(-1)[::every] for each in rounding.values()])
        arrays |= {"about/losses": losses, "about/probes": np.stack(self.probes)}
        arrays["about/samples"] = np.array(hashlib.sha256(repr(sorted(ids.items())).encode()).hexdigest())
        arrays["about/sensitive"] = np.array(sensitive(pl_module), dtype=str)
        np.savez(Path(trainer.default_root_dir, FILE), **arrays)


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


def rounding_limit(gradients: Iterable[Tensor], precision: str) -> float:
    """Return the size below which an element of a step's gradients is only what rounding has left of zero.

    The true gradient of a bias before BatchNorm is zero, for example. The terms of its sum are as large as those of
    other gradients, and so are their roundings. AdamW makes a whole step of them, in any direction.
    """
    largest = max((float(each.detach().float().square().mean().sqrt()) for each in gradients), default=0.0)
    return largest * min(MOST_ROUNDINGS * roundoff(precision), MOST_ROUNDING_SHARE)


def roundoff(precision: str) -> float:
    """Return the unit roundoff of the weights' type, which is float32 under mixed precision."""
    return UNIT_ROUNDOFF["32" if precision.endswith("mixed") else precision.partition("-")[0]]


def sensitive(module: nn.Module) -> list[str]:
    """Return the kinds of layers whose result depends on how a step is cut into pieces."""
    kinds = set()
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            kinds.add("BatchNorm")
        elif isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p:
            kinds.add("dropout")
    return sorted(kinds)


def _numpy(tensor: Tensor) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy().copy()
