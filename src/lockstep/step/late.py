"""`late`: the gradient of a step is applied so many steps later, and its sum over processes runs meanwhile.

It is the staleness of asynchronous SGD (Dean et al., Large scale distributed deep networks, 2012), but a fixed one:
which gradient meets which weights follows from the step alone, so a run is repeatable, and the same on every layout.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lockstep.step.batch import StepBatch
from lockstep.step.batch_norm import BatchNormStats
from lockstep.step.finite import FiniteGradientCheck
from lockstep.step.gradients import GradientSum, StartedSum

Taken = tuple[StartedSum, StepBatch, list[Tensor]]  # a gradient; of which step, without its data; the losses there


class LateGradients:
    """The `line` of gradients that are taken and not applied yet, the oldest first.

    Args:
        gradients: how a step's gradient is summed; its `late` says how many steps later it is applied.
        finite: what is done about one that is not finite.
    """

    def __init__(self, gradients: GradientSum, finite: FiniteGradientCheck) -> None:
        self.gradients = gradients
        self.finite = finite
        self.line: deque[Taken] = deque()

    def step(self, step_batch: StepBatch, losses: list[Tensor], statistics: BatchNormStats) -> None:
        """After a step's passes: starts its sum, and gives the parameters the gradient that is due, or none. That is
        waited for first, so that the small sum of the statistics has the link for itself."""
        if len(self.line) == self.gradients.late:
            _ = self.line[0][0].result
        statistics.finish(step_batch)
        kept = [replace(each, batch=None, draws=None) for each in step_batch.micro_batches]
        self.line.append((self.gradients.start(step_batch), replace(step_batch, micro_batches=kept), losses))
        if len(self.line) > self.gradients.late:
            self.give(self.line.popleft())

    def give(self, taken: Taken) -> None:
        """Gives the parameters a gradient; raises NonFinite if it is not finite."""
        started, step_batch, losses = taken
        self.gradients.give(started)
        strategy = self.gradients.strategy
        self.finite.look(strategy.lightning_module, strategy.optimizers[0], step_batch, losses)

    def state_dict(self) -> list[dict[str, Any]]:
        """All that are under way, summed; every process calls it. Raises NonFinite if one is not finite."""
        names = {id(p): name for name, p in self.gradients.strategy.lightning_module.named_parameters()}
        found = []
        for taken in self.line:
            started, step_batch, _ = taken
            gradients, bounds = started.result
            named = {names[id(p)]: g for p, g in zip(started.parameters, gradients, strict=True) if g is not None}
            if not all(bool(gradient.isfinite().all()) for gradient in named.values()):
                self.give(taken)
                self.finite.settle()
            found.append({"step": step_batch.step, "gradients": named, "bounds": bounds})
        return found

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Takes what a checkpoint of any layout held."""
        parameters = dict(self.gradients.strategy.lightning_module.named_parameters())
        self.line.clear()
        for saved in state:
            given = {parameters[name]: gradient for name, gradient in saved["gradients"].items()}
            started = StartedSum(list(given), lambda: ([], []))
            started.result = [torch.empty_like(p).copy_(gradient) for p, gradient in given.items()], saved["bounds"]
            self.line.append((started, StepBatch([], 0, 0, 0, saved["step"], True), []))
