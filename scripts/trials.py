"""A trial: a few optimizer steps on one layout, taken down to the bit. parity.py and differences.py compare them.

Each trial runs in workers that are forked from one parent, as a run of train.py does: the same module, data, Trainer
and loop, with one callback more, which writes down. The parent only compares files, with numpy.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Subset

from lockstep import fast, logs
from lockstep.callbacks import StandIn
from lockstep.config import Config, check
from lockstep.data import DataModule, Splits
from lockstep.launch import launch
from lockstep.summary import weights_sha256
from lockstep.training import make_module, make_trainer

FULL = 2  # steps before the tail: soon enough to see a wrong one before rounding has grown
PROBES = 10_000  # weights that are looked at after every step; all are compared at the end
UNIT_ROUNDOFF = {"64": 2.0**-53, "32": 2.0**-24, "16": 2.0**-11, "bf16": 2.0**-8}  # of what weights are kept in

Tensors = dict[str, NDArray[Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class Trial:
    """What is run: `changes` to the config, and a deliberate fault (see FAULTS) for controls."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    fault: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a trial left.

    Attributes:
        config: as checked.
        sha256: of weights and buffers at the end, as in summary.json.
        samples: a hash of the sample ids of every piece of every step.
        losses: mean loss of each step's samples, float64 [steps].
        probes: up to PROBES of the weights after each step, [steps, probes].
        weights, buffers: at the end, by name.
        gradients: of the last step, before clipping.
        metrics: of the test.
        sensitive: kinds of layers whose result depends on how a step is cut: BatchNorm, dropout.
    """

    config: Config
    sha256: str
    samples: str
    losses: NDArray[Any]
    probes: NDArray[Any]
    weights: Tensors
    buffers: Tensors
    gradients: Tensors
    metrics: dict[str, float]
    sensitive: list[str]


def prepare(raw: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """A train.py config for trials of `steps` optimizer steps: nothing is validated, logged or saved beside them."""
    return {
        **raw,
        "max_steps": steps,
        "max_epochs": steps,
        "val_every": None,
        "callbacks": {},
        "logger": {"name": "none"},
        "resume": None,
    }


def shorten(splits: Splits, steps: int, batch_size: int, pieces: int, tail: int | None, test_samples: int) -> Splits:
    """Splits in which `steps` optimizer steps pass several epochs, each with a short last step.

    Args:
        tail: samples of that last step; None: half as many as there are pieces, so that some pieces, and on many
            layouts some devices, have none.
        test_samples: of the test set, to keep trials short.
    """
    tail = min(tail or max(1, pieces // 2), batch_size)
    full = max(1, min(FULL, (len(splits.train) - tail) // batch_size))
    train = Subset(splits.train, range(min(full * batch_size + tail, len(splits.train))))
    return replace(splits, train=train, val=None, test=Subset(splits.test, range(min(test_samples, len(splits.test)))))


def run(trial: Trial, raw: Mapping[str, Any], splits: Splits, folder: Path) -> Outcome:
    """Runs a trial in workers of its own.

    Raises:
        Refusal: the trial's config can't be run; WorkerFailed: it failed.
    """
    config = check({**raw, **trial.changes})
    folder.mkdir(parents=True, exist_ok=True)
    found = launch(_work, config, splits, folder, trial.fault, layout=config.layout)
    file = folder / "record.npz"
    with np.load(file) as record:
        parts: dict[str, Any] = {"weights": {}, "buffers": {}, "gradients": {}, "curves": {}}
        for key in record:
            kind, _, name = key.partition("/")
            parts[kind][name] = record[key]
    file.unlink()  # as large as two checkpoints
    return Outcome(config=config, **found, **parts.pop("curves"), **parts)


def counted(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, with a counter on a terminal. Rich's progress bar would keep a thread in a parent that forks."""
    for number, item in enumerate(items, 1):
        if sys.stderr.isatty():
            end = "\n" if number == len(items) else ""
            print(f"\r{what} {number}/{len(items)} ", end=end, file=sys.stderr, flush=True)
        yield item


def difference(found: Tensors, reference: Tensors) -> float:
    """The largest relative difference of a tensor: norm of the difference over norm of the reference.

    A tensor with less than a thousandth of the whole norm is measured against that thousandth: the gradient of a bias
    before BatchNorm, say, is zero but for rounding, and as relative as one likes.
    """
    norms = {name: norm(tensor) for name, tensor in reference.items()}
    least = 1e-3 * float(np.sqrt(sum(value**2 for value in norms.values())))
    apart = [norm(found[name] - reference[name].astype(np.float64)) / max(norms[name], least, 1e-300) for name in norms]
    return max(apart, default=0.0)


def norm(values: NDArray[Any]) -> float:
    """Euclidean, by numpy's own loops: BLAS would start threads in a process that forks."""
    return float(np.sqrt(np.square(values, dtype=np.float64).sum()))


def roundoff(precision: str) -> float:
    """Unit roundoff of what the weights are kept in: float32 under mixed precision."""
    return UNIT_ROUNDOFF["32" if precision.endswith("mixed") else precision.partition("-")[0]]


# --- in the workers ---------------------------------------------------------------------------------------------------


def _work(config: Config, splits: Splits, folder: Path, fault: str | None) -> dict[str, Any]:
    rank = int(os.environ.get("RANK", "0"))
    logs.configure(folder, rank)
    fast.set_up(config.layout, config.threads, config.allocator)
    module = make_module(config, splits)
    data = DataModule(splits, config.layout, seed=config.seed, num_workers=config.num_workers)
    data.process = rank
    record = Record()
    trainer = make_trainer(config, folder, [StandIn(), record])
    if fault is not None:
        FAULTS[fault](trainer, module, data)
    trainer.fit(module, datamodule=data)
    state = trainer.strategy.lightning_module_state_dict()
    if rank == 0:
        record.save(folder / "record.npz", module)
    found = {"sha256": weights_sha256(state), "samples": record.samples, "sensitive": sensitive(module)}
    trainer.test(module, datamodule=data, verbose=False)
    return found | {"metrics": {name: float(value) for name, value in trainer.callback_metrics.items()}}


class Record(pl.Callback):
    """Writes a trial down, through hooks and the `Share`s that the loader yields."""

    def __init__(self) -> None:
        self.ids: dict[tuple[int, int], str] = {}  # (step, piece) -> hash of its sample ids
        self.losses: list[tuple[float, int]] = []  # sum over this process's samples, samples of the step
        self.probes: list[NDArray[Any]] = []
        self.gradients: Tensors = {}
        self.samples = ""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for turn in batch.turns:
            starts = np.cumsum([0, *turn.sizes])
            for piece, start, stop in zip(turn.pieces, starts, starts[1:], strict=False):
                self.ids[batch.step, piece] = hashlib.sha256(np.asarray(turn.ids[start:stop]).tobytes()).hexdigest()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if trainer.global_step + 1 == trainer.max_steps:
            self.gradients = {name: _numpy(p.grad) for name, p in pl_module.named_parameters() if p.grad is not None}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        own = sum(sum(turn.sizes) for turn in batch.turns)
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


# --- what is done wrong on purpose ------------------------------------------------------------------------------------


def _weights(trainer: pl.Trainer, weight: Any) -> None:
    """Replaces what a turn's mean loss counts for, `weight(turn, processes)`."""
    gradients = trainer.fit_loop.epoch_loop.automatic_optimization.gradients  # type: ignore[attr-defined]
    gradients.weight = lambda turn, share: weight(turn, gradients.processes)


def rounding(trainer: pl.Trainer, module: pl.LightningModule, data: DataModule, seed: int) -> None:
    """Every step's gradient is off by as many roundings as it has pieces, up or down: the yardstick. Adding pieces in
    another order does no more, and usually less."""
    gradients = trainer.fit_loop.epoch_loop.automatic_optimization.gradients  # type: ignore[attr-defined]
    generator, finish = torch.Generator().manual_seed(seed), gradients.finish
    size = 2 * roundoff(str(trainer.precision)) * data.layout.pieces

    def rounded(share: Any) -> None:
        finish(share)
        for gradient in (p.grad for p in module.parameters() if p.grad is not None):
            signs = torch.randint(0, 2, gradient.shape, generator=generator).to(gradient) * 2 - 1
            partial = gradient.abs().clamp_min(gradient.square().mean().sqrt())  # sums on the way may be larger
            gradient.add_(signs * partial, alpha=size)

    gradients.finish = rounded


def permuted(trainer: pl.Trainer, module: pl.LightningModule, data: DataModule) -> None:
    """The order of another seed; weights and dropout keep theirs."""
    data.plan = replace(data.plan, seed=data.plan.seed + 1)


def summed(trainer: pl.Trainer, module: pl.LightningModule, data: DataModule) -> None:
    """The pieces' gradients are added, not averaged."""
    _weights(trainer, lambda turn, processes: float(len(turn.pieces) * processes))


def windowed(trainer: pl.Trainer, module: pl.LightningModule, data: DataModule) -> None:
    """Every piece counts as in a full step, the short tail's too: accumulation as Lightning does it (#19987)."""
    _weights(trainer, lambda turn, processes: len(turn.pieces) * processes / data.layout.pieces)


FAULTS: dict[str, Any] = {fault.__name__: fault for fault in (permuted, summed, windowed)}
YARDSTICKS = [f"rounding {seed}" for seed in (1, 2, 3)]  # which ReLU flips first is chance: the largest of three
FAULTS |= {name: partial(rounding, seed=seed) for seed, name in enumerate(YARDSTICKS, 1)}
