"""Average the weights over the steps. The run validates, saves and tests the average."""

import itertools
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lockstep.checkpoint.parts import INDEX, SavedParts
from lockstep.launch.signals import Interrupted


class EMA(EMAWeightAveraging):
    """Lightning's exponential moving average of the weights, with a warm-up of the decay.

    The average starts with the weights of the first step. Each update is `average = decay x average + (1 - decay) x
    weights`. Validation, checkpoints (`state_dict`), the test and `weights_sha256` use the average.

    This class adds a warm-up, `min(decay, (1 + updates) / (10 + updates))`, as in TensorFlow's
    ExponentialMovingAverage. Without it, the average of a short run stays near the first weights. The average is stored
    on the module's device. Frozen weights keep their bits, and integers are copied. A run that is interrupted, or that
    has nothing left to train, ends with the average too.

    Args:
        decay: decay after the warm-up, the same on every layout (torchvision's reference multiplies it by devices). The
            average covers about `update_every_n_steps / (1 - decay)` optimizer steps.
        update_every_n_steps: optimizer steps between updates. The first step updates, and skipped steps count.
    """

    takes_whole_weights = True  # so it works where each device keeps a part of them

    def __init__(self, decay: float = 0.999, update_every_n_steps: int = 1) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay}: must be at least 0 and below 1")
        if not isinstance(update_every_n_steps, int) or update_every_n_steps < 1:
            raise ValueError(f"update_every_n_steps={update_every_n_steps}: must be a whole number of at least 1")
        super().__init__(decay=decay, update_every_n_steps=update_every_n_steps)
        self.decay = decay

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            # Lightning moves the module to the device after this hook, but not the average. The average's counter stays
            # on the host, which reads it at each update and would have to wait for a device.
            module = pl_module.to(trainer.strategy.root_device)
            self._average_model = Average(module, self)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load the average and the weights, whole ones even if they are saved in parts: the average is whole, too."""
        saved = checkpoint.get(INDEX)
        if isinstance(saved, SavedParts):
            for name in ("state_dict", "current_model_state"):
                saved.fill(checkpoint.get(name))
        super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the average from the whole weights, if an update is due."""
        if trainer.global_step > self._latest_update_step and self.should_update(step_idx=trainer.global_step - 1):
            with trainer.strategy.whole_weights():  # type: ignore[attr-defined]
                super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        with pl_module.trainer.strategy.whole_weights():  # type: ignore[attr-defined]
            super()._swap_models(pl_module)

    def _copy_average_to_current(self, pl_module: pl.LightningModule) -> None:
        with pl_module.trainer.strategy.whole_weights():  # type: ignore[attr-defined]
            super()._copy_average_to_current(pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the module the average if nothing was left to train: Lightning then does not call `on_train_end`."""
        self.on_train_end(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Interrupted):  # the summary must have the weights of the last checkpoint
            self.on_train_end(trainer, pl_module)


class Average(AveragedModel):
    """torch's AveragedModel with EMA's decay, for which the host never waits for a GPU.

    torch copies its counter to the device at each update, for each dtype.
    """

    def __init__(self, model: nn.Module, settings: EMA) -> None:
        super().__init__(model, use_buffers=True)
        self.settings = settings

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Move the average towards the weights and buffers of a module; the first time, copy them."""
        updates = int(self.n_averaged)  # on the host
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        averages, values = (itertools.chain(each.parameters(), each.buffers()) for each in (self.module, model))
        for average, value in zip(averages, values, strict=False):
            pair = average.detach(), value.detach().to(average.device, non_blocking=True)
            by_dtype.setdefault(average.dtype, []).append(pair)
        for dtype, pairs in by_dtype.items():
            ours, theirs = map(list, zip(*pairs, strict=True))
            if updates and dtype.is_floating_point:
                decay = min(self.settings.decay, (1 + updates) / (10 + updates))
                torch._foreach_lerp_(ours, theirs, 1 - decay)  # lerp keeps the bits of frozen weights
            else:
                torch._foreach_copy_(ours, theirs)
        self.n_averaged += 1
