"""An extra for campaigns over simulated machines: a device that takes its time, and a record of what its worker does.

Several simulated machines share the cores of one. So that they do not slow each other down, each piece of a step waits
in `time.sleep`, as a worker waits for an accelerator that computes.
"""

import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lockstep import gather_objects
from lockstep.config.extras import Extra, RunParts


class Device(Extra):
    """The device of a worker.

    Args:
        folder: for the events, in a file for each machine.
        seconds: for which a piece is computed.
        until: a file; as soon as it exists, pieces take no longer than they need.
    """

    changes_weights = False

    def __init__(self, folder: str, seconds: float, until: str) -> None:
        self.file, self.seconds, self.until = Path(folder) / f"{platform.node()}.jsonl", seconds, Path(until)
        self.times = {"born": _born(), "checked": time.time()}  # of this worker's start

    def notes(self, config: Any, resumes: bool) -> Iterable[str]:
        self.times["read"] = time.time()
        return ()

    def callbacks(self, parts: RunParts) -> Sequence[Callback]:
        return [_Watch(self)]

    def write(self, what: str, **values: Any) -> None:
        """Append an event to the machine's file."""
        event = {"what": what, "time": time.time(), "pid": os.getpid(), **values}
        with self.file.open("a") as file:
            file.write(json.dumps(event) + "\n")


class _Watch(Callback):
    def __init__(self, device: Device) -> None:
        self.device = device
        self.begun = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        group = gather_objects(f"{platform.node()} {os.getpid()}")[0]
        place = {"machine": platform.node(), "rank": trainer.global_rank, "world": trainer.world_size}
        self.device.write("starts", group=group, **place, **self.device.times)
        pl_module.net.register_forward_hook(self._compute)

    def _compute(self, net: Any, inputs: Any, output: Any) -> None:
        if net.training and not self.device.until.exists():
            time.sleep(self.device.seconds)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.begun:
            self.begun = True
            self.device.write("begins", step=trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.device.write("step", step=trainer.global_step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.device.write("ends", why=type(exception).__name__)


def _born() -> float:
    """Return when this process was started, in seconds since the epoch. See proc(5)."""
    with suppress(OSError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        since = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - since
    return time.time()
