"""Keep each process's own gradient, and average the weights of all processes."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import WeightAveraging
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from lockstep.errors import UserError
from lockstep.lightning.strategy import StepStrategy
from lockstep.step.batch import MicroBatch, StepBatch
from lockstep.step.gradients import GradientSum, trained_parameters
from lockstep.step.strategy import PieceStrategy, proxy


class AverageWeights(Callback):
    """Averages the weights of all processes every few steps, and before the weights are validated or saved.

    The number of the step decides when. A counter, as in Lightning's `model_averaging_period`, would start again in a
    resumed run.
    """

    def __init__(self, every: int, setting: str = "") -> None:
        self.every = every
        self.setting = setting  # what chooses it, for messages
        self._differ = False  # whether the weights may differ between processes

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, WeightAveraging):
                kind = type(callback).__name__
                raise UserError(f"{kind}: with {self.setting} each device would have its own average: leave one out")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._differ = True
        if trainer.global_step % self.every == 0:
            self.average(pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.average(pl_module)

    on_train_epoch_end = on_train_end = on_validation_start

    def average(self, module: Any) -> None:
        """Average the weights if they may differ. Every process calls this.

        torch's function changes the memory layout of its tensors, but not that of the optimizer's state. So it gets
        copies.
        """
        if self._differ:
            self._differ = False
            weights = [parameter.detach() for parameter in trained_parameters(module)]
            copies: list[Any] = [weight.clone() for weight in weights]
            everybody: Any = dist.group.WORLD
            average_parameters(iter(copies), everybody)
            torch._foreach_copy_(weights, copies)


class SavesAverages(StepStrategy):
    """A method for `proxy`: the weights are averaged before they are saved."""

    averages: AverageWeights

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.averages.average(self.lightning_module)
        return super().lightning_module_state_dict()


class LocalGradients(GradientSum):
    """Computes the gradient of the mean loss over this process's samples, and sends nothing."""

    def __init__(self, strategy: PieceStrategy, averages: AverageWeights) -> None:
        saves: SavesAverages = proxy(strategy, SavesAverages)
        saves.averages = averages
        super().__init__(saves, replicas=1)

    def weight(self, micro_batch: MicroBatch, step_batch: StepBatch) -> float:
        return micro_batch.size / step_batch.num_local_samples
