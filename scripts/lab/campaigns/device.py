"""An extra for campaigns over simulated machines: a device that takes its time, and a record of what its worker does.

Simulated machines share the cores of one. So that they do not slow each other down, each piece of a step sleeps, as a
worker waits for an accelerator that computes.
"""

import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lockstep import gather_objects
from lockstep.config.extras import Extra, RunParts


class Device(Extra):
    """The device of a worker.

    Args:
        folder: for the record, in a file for each machine.
        seconds: for which a piece is computed.
        until: a file; as soon as it exists, pieces take no longer than they need.
        skips: change the weights a little after each restart, as a run does that skips a step. For controls.
    """

    changes_weights = False

    def __init__(self, folder: str, seconds: float, until: str, skips: bool) -> None:
        self.file, self.seconds, self.until = Path(folder) / f"{platform.node()}.jsonl", seconds, Path(until)
        self.skips = skips
        self.points = {"born": _born(), "checked": time.time()}

    def notes(self, config: Any, resumes: bool) -> Iterable[str]:
        self.points["read"] = time.time()
        return ()

    def callbacks(self, parts: RunParts) -> Sequence[Callback]:
        return [Watch(self, skips=self.skips and bool(parts.resumed))]

    def write(self, what: str, **values: Any) -> None:
        """Append an event to the machine's file."""
        with self.file.open("a") as file:
            file.write(json.dumps({"what": what, "time": time.time(), "pid": os.getpid(), **values}) + "\n")


class Watch(Callback):
    """Lets a device compute, and records its steps."""

    def __init__(self, device: Device, skips: bool) -> None:
        self.device, self.skips, self.begun = device, skips, False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        group = gather_objects(f"{platform.node()}:{os.getpid()}")[0]
        self.device.write("starts", group=group, world=trainer.world_size, **self.device.points)
        pl_module.net.register_forward_hook(self._compute)

    def _compute(self, net: Any, inputs: Any, output: Any) -> None:
        if net.training and not self.device.until.exists():
            time.sleep(self.device.seconds)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if not self.begun:
            self.begun = True
            self.device.write("begins", step=trainer.global_step)
            self.rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
            self._set_rates(trainer, [0.0] * len(self.rates)) if self.skips else None

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self.skips:
            self.skips = False
            self._set_rates(trainer, self.rates)
        self.device.write("step", step=trainer.global_step)

    def _set_rates(self, trainer: Any, rates: Sequence[float]) -> None:
        for group, rate in zip(trainer.optimizers[0].param_groups, rates, strict=True):
            group["lr"] = rate

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.device.write("ends", why=type(exception).__name__)


def _born() -> float:
    """Return when this process was started, in seconds since the epoch. See proc(5)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
