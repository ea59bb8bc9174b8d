"""Where the time of one optimizer step goes, seen from a callback's hooks."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

PARTS = ("data_wait", "compute", "all_reduce", "other")


class StepSplit:
    """Takes one step's time apart. Whoever uses it calls `begin` when the step's batch is there, `mark` in the hooks
    between, `end` when the step has ended, and `seconds` later.

    `all_reduce` is what communication adds to a step: from the moment when the last gradient is there to the end of the
    backward pass, and the sums over ranks after it. What overlaps with the backward pass costs nothing and is not in
    it; what a rank waits for slower ones is. On a GPU the parts are the device's own time, read from events, so that
    nothing waits for it until `seconds`.

    Attributes:
        running: whether a step is being taken apart.
        taken: whether `seconds` has something to tell.
        samples: of the step, on this rank.
    """

    def __init__(self) -> None:
        self.running = self.taken = False
        self.samples = 0
        self._cuda = False
        self._wait = 0.0
        self._marks: list[tuple[str, Any]] = []  # what has ended, and when
        self._last_gradient: Any = None
        self._handles: list[Any] = []

    def begin(self, trainer: Trainer, module: LightningModule, wait: float, samples: int) -> None:
        """`wait`: seconds that the step has waited for its batch."""
        self.running, self.samples = True, samples
        self._cuda, self._wait = module.device.type == "cuda", wait
        self._last_gradient = None
        self._marks = [("", self._now())]
        if trainer.world_size > 1:
            parameters = [p for p in module.parameters() if p.requires_grad]
            self._handles = [p.register_post_accumulate_grad_hook(self._gradient) for p in parameters]
        for optimizer in trainer.optimizers:
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self.mark("compute")))

    def mark(self, part: str) -> None:
        """What has passed since the last mark was `part`."""
        if self.running:
            self._marks.append((part, self._now()))

    def mark_backward(self) -> None:
        """A backward pass has ended. What came after its last gradient was communication."""
        if self._last_gradient is None:
            self.mark("compute")
        else:
            self._marks.append(("compute", self._last_gradient))
            self._last_gradient = None
            self.mark("all_reduce")

    def end(self) -> None:
        """The step is over; nothing of ours stays in the module."""
        self.mark("other")
        self.taken |= self.running
        self.running = False
        while self._handles:
            self._handles.pop().remove()

    def seconds(self) -> list[float]:
        """In the order of PARTS; nan where no step was taken apart since. On a GPU it waits for the device."""
        if not self.taken:
            return [float("nan")] * len(PARTS)
        self.taken = False
        found = dict.fromkeys(PARTS, 0.0) | {"data_wait": self._wait}
        if self._cuda:
            self._marks[-1][1].synchronize()
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            found[part] += before.elapsed_time(after) / 1000 if self._cuda else after - before
        return list(found.values())

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _gradient(self, parameter: torch.Tensor) -> None:
        self._last_gradient = self._now()
