"""An average of the weights over the steps, which is what a run validates, keeps and tests."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from lockstep.launch.signals import Interrupted


class EMA(EMAWeightAveraging):
    """Lightning's exponential moving average: `average = decay x average + (1 - decay) x weights`, after the weights of
    the first step. Validation, checkpoints (`state_dict`), the test and `weights_sha256` are the average's.

    What this class adds: a warm-up of the decay, `min(decay, (1 + updates) / (10 + updates))`, as in TensorFlow's
    ExponentialMovingAverage, so that a short run's average does not stay at its first weights. The average lies on the
    module's device, frozen weights keep their bits, whole numbers are copied, and a run that is interrupted, or has
    nothing left to train, ends with the average as well.

    Args:
        decay: of an update after the warm-up, on every layout: torchvision's reference multiplies by devices. The
            average goes back about `update_every_n_steps / (1 - decay)` optimizer steps.
        update_every_n_steps: optimizer steps between updates, the first step's is one; a skipped step counts.
    """

    def __init__(self, decay: float = 0.999, update_every_n_steps: int = 1) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay}: must be at least 0 and below 1")
        if not isinstance(update_every_n_steps, int) or update_every_n_steps < 1:
            raise ValueError(f"update_every_n_steps={update_every_n_steps}: must be a whole number of at least 1")
        super().__init__(decay=decay, update_every_n_steps=update_every_n_steps)
        self.decay = decay

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            # Lightning moves the module after this hook, and would leave the average on the host. The average's counter
            # stays on the host, which reads it at each update, and would wait for the device.
            module = pl_module.to(trainer.strategy.root_device)
            self._average_model = AveragedModel(module, multi_avg_fn=self._update, use_buffers=True)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Where nothing was left to train, Lightning leaves `on_train_end` out, which gives the module the average."""
        self.on_train_end(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Interrupted):  # what the run ends with is what its last checkpoint names
            self.on_train_end(trainer, pl_module)

    def decay_at(self, updates: int) -> float:
        """Return the decay of an update that follows so many others."""
        return min(self.decay, (1 + updates) / (10 + updates))

    @torch.no_grad()
    def _update(self, averages: Any, values: Any, count: Tensor | int) -> None:
        if averages[0].is_floating_point():
            assert self._average_model is not None
            updates = int(self._average_model.n_averaged)  # `count` is the same number on the device
            torch._foreach_lerp_(averages, values, 1 - self.decay_at(updates))  # of what is frozen, not a bit changes
        else:
            torch._foreach_copy_(averages, values)
