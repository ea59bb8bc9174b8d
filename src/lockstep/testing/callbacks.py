"""Callbacks of the runs of `ModuleTests`: one watches what changes beside the weights, one kills the run."""

import hashlib
import json
import os
import random
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

from lockstep.step.first_step import FirstStepCheck

LIGHTNINGS = frozenset(vars(LightningModule()))  # attributes that every LightningModule has
WATCHED = "watched.json"
PLAIN = bool | int | float | complex | str | bytes | None


class Watch(Callback):
    """Records what changes from step to step beside the parameters and the statistics of normalisation layers.

    It writes WATCHED: `generators` (which of Python's and numpy's the steps draw from), `state` (names of attributes
    and buffers that change) and `trains` (whether any parameter has changed).

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder, WATCHED)
        self.generators: dict[str, str] = {}
        self.state: dict[str, str] = {}
        self.changed: dict[str, set[str]] = {"generators": set(), "state": set()}
        self.first: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, *args: Any) -> None:
        """Compare the state with that of the step before."""
        first = not self.first
        if first:
            self.first = {name: value.detach().clone() for name, value in pl_module.named_parameters()}
        now = dict(state(pl_module))
        self.changed["state"] |= {name for name in now if not first and now[name] != self.state.get(name)}
        self.state, self.generators = now, generators()  # hooks of a step begin with a seed of their own

    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: Tensor) -> None:
        """Compare with the start of the step."""
        self.changed["generators"] |= {name for name, now in generators().items() if now != self.generators.get(name)}

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Write the record."""
        changed: dict[str, Any] = {kind: sorted(names) for kind, names in self.changed.items()}
        pairs = ((value, self.first.get(name)) for name, value in pl_module.named_parameters())
        changed["trains"] = any(before is None or not torch.equal(value, before) for value, before in pairs)
        self.path.write_text(json.dumps(changed))


class WithoutTrial(Callback):
    """Leaves out the check before the first step, since `ModuleTests` says more about each fault."""

    changes_weights = False  # so the record of settings that affect the weights leaves this callback out

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Mark the check as made."""
        for hook in trainer.strategy.hooks:
            if isinstance(hook, FirstStepCheck):
                hook.done = True


class Kill(Callback):
    """Kills the process with SIGKILL after a step, once the checkpoints before it are on the disk.

    Args:
        after: the step, counted from 1.
    """

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Kill this process after the step."""
        if trainer.global_step == self.after:
            trainer.strategy.checkpoint_io.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def generators() -> dict[str, str]:
    """Return a digest of the state of Python's and numpy's global generators."""
    _, keys, position, *_ = np.random.get_state()  # noqa: NPY002  a user's module may draw from it
    return {"Python's random": digest(random.getstate()), "numpy's np.random": digest([keys, position])}


def state(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield name and digest of each attribute and buffer that is neither a parameter nor a running statistic."""
    for path, part in module.named_modules():
        if isinstance(part, _NormBase | Metric):
            continue
        values = {name: value for name, value in vars(part).items() if name not in LIGHTNINGS}
        for name, value in (values | dict(part.named_buffers(recurse=False))).items():
            yield f"{path}.{name}".lstrip("."), digest(value)


def digest(value: Any) -> str:
    """Return a text that changes with a value of plain data, tensors, arrays or generators; "" for other values."""
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, np.random.Generator):
        value = repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        value = value.getstate()
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        value = value.tobytes()
    if isinstance(value, Mapping):
        return str([(str(key), digest(each)) for key, each in value.items()])
    if isinstance(value, list | tuple):
        return str([digest(each) for each in value])
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16] if isinstance(value, PLAIN) else ""
