"""A callback that times training, `callbacks.clock._target_=bench.clock.Clock`."""

import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch

from lockstep.callbacks.meter import peak_gib


class Clock(pl.Callback):
    """Time training. Each rank writes `clock_<rank>.json` into the run's folder when training ends, with:

    - `steps`: seconds of each optimizer step but the first;
    - `pieces`: seconds of each micro-batch but a step's last one, whose backward pass may wait for other ranks;
    - `ready`: median seconds from the start of a step until the gradient of each trained parameter is complete;
    - `sizes`: bytes of these parameters;
    - `peak_gib`: largest memory, of tensors on a GPU, else of the process;
    - `held`: bytes of the rank's parameters and its optimizer state;
    - `waits`: the part of the time that a pipeline's stage waits;
    - `sent`: bytes per step that left the machine by eth0, 0 without an eth0.

    Args:
        pieces: time them too. On a GPU this waits for each.
        gradients: time them too. On a GPU this waits for each.
    """

    def __init__(self, pieces: bool = False, gradients: bool = False) -> None:
        self.pieces = pieces
        self.gradients = gradients
        self.complete: list[float] = []  # when each gradient of the step was complete
        self.ready: list[list[float]] = []  # for each step
        self.sizes: list[int] = []
        self.ends: list[float] = []
        self.backward: list[float] = []  # when each backward pass of the step began
        self.took: list[float] = []
        self.first_end = (0.0, 0)  # seconds waited and bytes sent when the first step ended

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.gradients:
            return
        trained = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
        self.sizes, self.complete = [parameter.nbytes for parameter in trained], [0.0] * len(trained)

        def made(index: int) -> Any:
            def note(_: torch.Tensor) -> None:
                self.complete[index] = _now(pl_module)

            return note

        for index, parameter in enumerate(trained):
            parameter.register_post_accumulate_grad_hook(made(index))

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        if self.pieces:
            self.backward.append(_now(pl_module))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self.ends:
            self.ready.append([end - self.ends[-1] for end in self.complete])
        self.ends.append(_now(pl_module))
        self.first_end = self.first_end if self.ends[1:] else self._so_far(trainer)
        self.took += [end - start for start, end in pairwise(self.backward)]
        self.backward = []

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        steps = [end - start for start, end in pairwise(self.ends)]
        record: dict[str, Any] = {
            "steps": steps,
            "pieces": self.took,
            "peak_gib": peak_gib(pl_module.device),
            "sizes": self.sizes,
        }
        strategy: Any = trainer.strategy
        stored = [parameter for parameter in pl_module.parameters() if strategy.holds(parameter)]
        state = [value for each in trainer.optimizers[0].state.values() for value in each.values()]
        record["held"] = sum(each.nbytes for each in [*stored, *state] if torch.is_tensor(each))
        waited, sent = (now - then for now, then in zip(self._so_far(trainer), self.first_end, strict=True))
        record |= {"waits": waited / max(sum(steps), 1e-9), "sent": sent / max(len(steps), 1)}
        record["ready"] = [median(times) for times in zip(*self.ready, strict=True)]
        Path(trainer.default_root_dir, f"clock_{trainer.global_rank}.json").write_text(json.dumps(record))

    def _so_far(self, trainer: pl.Trainer) -> tuple[float, int]:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
        sent = next((int(line.split()[9]) for line in lines if line.strip().startswith("eth0:")), 0)
        return getattr(trainer.strategy, "waited_seconds", 0.0), sent


def _now(module: pl.LightningModule) -> float:
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
    return time.perf_counter()
