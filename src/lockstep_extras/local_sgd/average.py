"""Keep each process's own gradient, and average the weights of all processes."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from lockstep.step.batch import MicroBatch, StepBatch
from lockstep.step.gradients import GradientSum, trained_parameters
from lockstep.step.passes import Step, StepHook
from lockstep.step.strategy import PieceStrategy


class LocalGradients(GradientSum):
    """Computes the gradient of the mean loss over this process's samples, and sends nothing."""

    def __init__(self, strategy: PieceStrategy) -> None:
        super().__init__(strategy, world_size=1)

    def weight(self, micro_batch: MicroBatch, step_batch: StepBatch) -> float:
        return micro_batch.size / step_batch.num_local_samples


class AverageWeights(StepHook):
    """Averages the weights of all processes every few steps, and before the weights are validated or saved.

    The number of the step decides when. A counter, as in Lightning's `model_averaging_period`, would start again in a
    resumed run.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._module: Any = None  # the module, if its weights may differ between processes; else None

    def after_optimizer_step(self, step: Step) -> None:
        self._module = step.module
        if (step.number + 1) % self.every == 0:
            self.before_weights_are_read()

    def before_weights_are_read(self) -> None:
        """Average the weights if they may differ.

        torch's function changes the memory layout of its tensors, but not that of the optimizer's state. So it gets
        copies.
        """
        if self._module is not None:
            weights = [parameter.detach() for parameter in trained_parameters(self._module)]
            self._module = None
            copies: list[Any] = [weight.clone() for weight in weights]
            everybody: Any = dist.group.WORLD
            average_parameters(iter(copies), everybody)
            torch._foreach_copy_(weights, copies)
