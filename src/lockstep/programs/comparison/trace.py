"""Take some steps of a run again, on one device, and record every value that a step computes, in order.

The values are the samples, the network's input, the output of each layer, the loss, the gradients and the new weights.
Of each tensor only a hash and a short sketch are stored. Two sketches give the distance of their tensors.
"""

import hashlib
import shutil
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lockstep.config.check import Config, check
from lockstep.config.instantiate import locate
from lockstep.config.pages import group_file
from lockstep.config.portable import choose_kernels
from lockstep.data import Splits
from lockstep.errors import UserError
from lockstep.programs.common.training import train_from, train_quietly

BUCKETS = 64  # numbers in a sketch
# Keys that decide how often and where a run writes, but not what it computes.
WRITING: dict[str, Any] = {
    "logger": {},
    "checkpoint_every": None,
    "checkpoint_keep": 0,
    "resume": None,
    "max_restarts": 0,
}


@dataclass(frozen=True)
class Value:
    """A value that a step computes.

    Attributes:
        stage: what it is: weights (before the first step), samples, data, input, output, loss, gradient, update.
        name: the layer, the parameter or the sample.
        sha256: the hash of its type, its shape and its bytes.
        sketch: float64 [BUCKETS], empty if it is no tensor: the distance of two sketches estimates the distance of the
            tensors (count sketch; Charikar, Chen and Farach-Colton, 2002).
    """

    stage: str
    name: str
    sha256: str
    sketch: tuple[float, ...] = ()


Steps = dict[int, list[Value]]  # by optimizer step since the run began; 0: before the first


def value_of(stage: str, name: str, value: Any) -> Value:
    if not isinstance(value, Tensor):
        return Value(stage, name, hashlib.sha256(repr(value).encode()).hexdigest())
    plain = value.detach().cpu().contiguous().reshape(-1)
    sha256 = hashlib.sha256(f"{value.dtype}{list(value.shape)}".encode())
    sha256.update(plain.view(torch.uint8).numpy().data if plain.numel() else b"")
    return Value(stage, name, sha256.hexdigest(), sketch_of(plain))


def sketch_of(flat: Tensor) -> tuple[float, ...]:
    signed = flat.double() * _signs(flat.numel())
    return tuple(nn.functional.pad(signed, (0, -len(signed) % BUCKETS)).view(-1, BUCKETS).sum(0).tolist())


@lru_cache(maxsize=64)
def _signs(size: int) -> Tensor:
    return torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(size)).double() * 2 - 1


def apart(one: Value, other: Value) -> float:
    """Return the distance of two values as a share of the second one's size.

    Return 0 only if all bits are the same, and infinity if there is no distance.
    """
    if one.sha256 == other.sha256:
        return 0.0
    if not one.sketch or not other.sketch:
        return float("inf")
    a, b = (torch.tensor(value.sketch, dtype=torch.float64) for value in (one, other))
    return max(float((a - b).norm() / b.norm().clamp_min(1e-300)), sys.float_info.min)


class Ended(Exception):
    """The last step that was asked for is done.

    Attributes:
        values: the values of each step.
    """

    def __init__(self, steps: Steps) -> None:
        super().__init__("the trace is complete")
        self.values = steps


class Trace(pl.Callback):
    """Records the values of each step, and ends the run after step `last` with `Ended`."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._steps: Steps = {}
        self._now: list[Value] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step == 0:
            self._steps[0] = [value_of("weights", name, value) for name, value in pl_module.state_dict().items()]
        if self._last <= trainer.global_step:
            raise Ended(self._steps)
        for name, layer in pl_module.named_modules():
            if not list(layer.children()) and not hasattr(layer, "compute"):  # a layer, and not a metric
                layer.register_forward_hook(partial(self._record_layer, pl_module, name))

    def _record_layer(self, module: nn.Module, name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        if not module.training or not self._now:  # in a validation; frozen layers are never in training mode
            return
        if not any(value.stage in ("input", "output") for value in self._now):
            self._now += [value_of("input", name, each) for each in inputs]
        self._now.append(value_of("output", name, output))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> Any:
        step = [value_of("samples", "the step", [int(id_) for each in batch.micro_batches for id_ in each.ids])]
        step += [value_of("samples", "the pieces", [list(map(int, each.ids)) for each in batch.micro_batches])]
        for each in batch.micro_batches:
            parts = each.batch if isinstance(each.batch, list | tuple) else [each.batch]
            for kind, part in zip(("image", "label"), parts, strict=False):
                if isinstance(part, Tensor) and len(part) == len(each.ids):
                    rows = zip(each.ids, part, strict=True)
                    step += [value_of("data", f"the {kind} of sample {id_}", row) for id_, row in rows]
        self._now = self._steps[trainer.global_step + 1] = step

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._now.append(value_of("loss", "the loss", loss))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._now += [value_of("gradient", name, each.grad) for name, each in pl_module.named_parameters()]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._now += [value_of("update", name, value) for name, value in pl_module.state_dict().items()]
        if trainer.global_step >= self._last:
            raise Ended(self._steps)


def prepare(recorded: Mapping[str, Any], threads: int, layout: Mapping[str, Any] | None = None) -> Config:
    """Return the config of a run for this machine: on one device, without what only writes.

    Args:
        recorded: the resolved config that the run recorded. Its classes must be checked already.
        threads: CPU threads of one of its workers.
        layout: the config of a run whose layout is taken instead of one device.

    Raises:
        UserError: the config does not fit this checkout.
    """
    raw = {**deepcopy(dict(recorded)), **WRITING, "threads": threads}
    raw |= {group: _changing(raw, group) for group in ("callbacks", "extras")}
    raw["speed"] = {**(raw.get("speed") or {}), "resident": False}
    pieces = check({**raw, "callbacks": {}}).layout.pieces
    place: dict[str, Any] = {"strategy": group_file("strategy", "auto"), "devices": 1, "num_nodes": 1}
    if layout is not None:
        compression = (raw.get("strategy") or {}).get("compression", "none")
        place = {key: layout[key] for key in place}
        place["strategy"] = {**place["strategy"], "compression": compression}
    raw |= {**place, "pieces": pieces, "accumulate_grad_batches": None}
    return check(raw)


def needs_layout(recorded: Mapping[str, Any]) -> bool:
    """Check whether the weights of a run depend on its layout by more than rounding: compression, and some extras."""
    compression = (recorded.get("strategy") or {}).get("compression", "none")
    return bool(_changing(recorded, "extras")) or compression != "none"


def _changing(raw: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return the callbacks or the extras of a config that may change the weights."""
    changing = {}
    for name, options in (raw.get(group) or {}).items():
        if options:
            located = locate(f"{group}.{name}._target_", str(options.get("_target_")))
            if getattr(located, "changes_weights", True):
                changing[name] = options
    return changing


def take_steps(config: Config, data: Splits, start: Path | None, last: int, folder: Path) -> Steps:
    """Train from a checkpoint, or from the seed, up to a step. Return the values of its steps.

    Args:
        config: what `prepare` returned.
        data: the data, without a test split.
        start: the checkpoint; None: from the seed.
        last: the last step, counted from the run's beginning; 0: the initial weights only.
        folder: a folder that does not exist. It is deleted afterwards.

    Raises:
        UserError, WorkerFailed, Interrupted: see `launch`.
    """
    try:
        trace = {"_target_": "lockstep.programs.comparison.trace.Trace", "last": last}
        config = replace(config, callbacks={**config.callbacks, "trace": trace})
        choose_kernels(config.layout.exact)
        steps: Steps = train_from(start, config, data, folder, _work)
        return steps
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _work(config: Config, data: Splits, folder: Path) -> Steps:
    try:
        train_quietly(config, data, folder)
    except Ended as ended:
        return ended.values
    raise UserError("the run ended before the step was reached")
