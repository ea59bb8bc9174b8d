"""Where the time of one optimizer step goes, seen from a callback's hooks."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

PARTS = ("data_wait", "forward", "backward", "all_reduce", "optimizer", "other")


class StepSplit:
    """Takes one step's time apart. Whoever uses it calls `begin` when the step's batch is there, `mark` in the hooks
    between, and `seconds` when the step has ended.

    `all_reduce` is what communication adds to a step: from the moment when the last gradient is there to the end of the
    backward pass, and the sums over ranks after it. What overlaps with the backward pass costs nothing and is not in
    it; what a rank waits for slower ones is. On a GPU the parts are the device's own time, read from events, so that
    nothing waits for it until `seconds`.
    """

    def __init__(self) -> None:
        self._cuda = False
        self._wait = 0.0
        self._marks: list[tuple[str, Any]] = []
        self._last_gradient: Any = None
        self._handles: list[Any] = []

    def begin(self, trainer: Trainer, module: LightningModule, wait: float) -> None:
        """`wait`: seconds that the step has waited for its batch."""
        self._cuda = module.device.type == "cuda"
        self._wait = wait
        self._last_gradient = None
        self._marks = [("", self._now())]
        if trainer.world_size > 1:
            parameters = [p for p in module.parameters() if p.requires_grad]
            self._handles = [p.register_post_accumulate_grad_hook(self._gradient) for p in parameters]
        for optimizer in trainer.optimizers:
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self.mark("optimizer")))

    def mark(self, part: str) -> None:
        """What has passed since the last mark was `part`; of a backward pass, up to its last gradient."""
        if not self._marks:
            return
        if part == "backward" and self._last_gradient is not None:
            self._marks.append((part, self._last_gradient))
            part, self._last_gradient = "all_reduce", None
        self._marks.append((part, self._now()))

    def end(self) -> None:
        """The step is over; nothing of ours stays in the module."""
        self.mark("other")
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def seconds(self) -> dict[str, float]:
        """By part, in the order of PARTS; empty where no step was taken apart. On a GPU it waits for the device."""
        if not self._marks:
            return {}
        found = dict.fromkeys(PARTS, 0.0) | {"data_wait": self._wait}
        if self._cuda:
            self._marks[-1][1].synchronize()
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            found[part] += before.elapsed_time(after) / 1000 if self._cuda else after - before
        self._marks = []
        return found

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _gradient(self, parameter: torch.Tensor) -> None:
        self._last_gradient = self._now()
