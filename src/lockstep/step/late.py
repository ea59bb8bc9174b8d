"""`late`: the gradient of a step is applied so many steps later, and its sum over processes runs meanwhile.

It is the staleness of asynchronous SGD (Dean et al., Large scale distributed deep networks, 2012), but a fixed one:
which gradient meets which weights follows from the step alone, so a run is the same on every layout and repeatable.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.step.batch import StepBatch
from lockstep.step.batch_norm import BatchNormStats
from lockstep.step.finite import FiniteGradientCheck
from lockstep.step.gradients import GradientSum, StartedSum


@dataclass(eq=False)
class Taken:
    """A gradient under way, and of which step: its micro-batches without their data, and their losses."""

    sum: StartedSum
    step_batch: StepBatch
    losses: list[Tensor]


class LateGradients:
    """The gradients that are taken and not applied yet, the oldest first.

    Args:
        gradients: how a step's gradient is summed; its `late` says how many steps later it is applied.
        finite: what is done about one that is not finite.
    """

    def __init__(self, gradients: GradientSum, finite: FiniteGradientCheck) -> None:
        self.gradients = gradients
        self.finite = finite
        self.line: deque[Taken] = deque()

    def step(self, step_batch: StepBatch, losses: list[Tensor], statistics: BatchNormStats) -> None:
        """After a step's passes: starts its sum, and gives the parameters the gradient that is due, or none.

        What is due is waited for first: the small sum of the statistics then has the link for itself.
        """
        if len(self.line) == self.gradients.late:
            _ = self.line[0].sum.result
        statistics.finish(step_batch)
        kept = [replace(each, batch=None, draws=None) for each in step_batch.micro_batches]
        self.line.append(Taken(self.gradients.start(step_batch), replace(step_batch, micro_batches=kept), losses))
        if len(self.line) > self.gradients.late:
            self.give()

    def give(self) -> None:
        """Gives the parameters the oldest gradient.

        Raises:
            NonFinite: it is not finite.
        """
        self._put(self.line.popleft())

    def state_dict(self) -> list[dict[str, Any]]:
        """All that are under way, summed; every process calls it.

        Raises:
            NonFinite: one is not finite.
        """
        names = {id(p): name for name, p in self.gradients.strategy.lightning_module.named_parameters()}
        found = []
        for taken in self.line:
            gradients, bounds = taken.sum.result
            pairs = zip(taken.sum.parameters, gradients, strict=True)
            named = {names[id(parameter)]: gradient for parameter, gradient in pairs if gradient is not None}
            if not all(bool(gradient.isfinite().all()) for gradient in named.values()):
                self._put(taken)
                self.finite.settle()
            found.append({"step": taken.step_batch.step, "gradients": named, "bounds": bounds})
        return found

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Takes what a checkpoint of any layout held."""
        parameters = dict(self.gradients.strategy.lightning_module.named_parameters())
        self.line.clear()
        for saved in state:
            given = {parameters[name]: gradient for name, gradient in saved["gradients"].items()}
            started = StartedSum(list(given), lambda: ([], []))
            started.result = [torch.empty_like(p).copy_(gradient) for p, gradient in given.items()], saved["bounds"]
            self.line.append(Taken(started, StepBatch([], 0, 0, 0, saved["step"], True), []))

    def _put(self, taken: Taken) -> None:
        self.gradients.give(taken.sum)
        strategy = self.gradients.strategy
        self.finite.look(strategy.lightning_module, strategy.optimizers[0], taken.step_batch, taken.losses)
