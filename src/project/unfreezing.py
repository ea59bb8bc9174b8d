"""A callback that unfreezes what `model.freeze` holds, at an epoch; conf/callbacks/unfreeze.yaml names it."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch.optim import Optimizer

from lockstep.arithmetic.layout import Refusal
from lockstep.run.checks import matching


class Unfreeze(BaseFinetuning):
    """Trains what was frozen until then; it keeps the factor that `optimizer.lr_scale` gives it.

    epoch: passes over the training set before that; or by pattern of parameter names, of several the last that matches,
        `{net.*: 4, net.layer4.*: 2}`.
    """

    def __init__(self, epoch: int | Mapping[str, int] = 1) -> None:
        super().__init__()
        self.epochs = dict(epoch) if isinstance(epoch, Mapping) else {"*": epoch}
        if not all(type(each) is int and each >= 1 for each in self.epochs.values()):
            raise ValueError(f"epoch={epoch}: must be whole numbers of at least 1, what never trains stands in none")
        self.patterns: dict[str, str] = {}  # by the name of a parameter, what decides about it

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        """`model.freeze` has done it; before a test nothing is to be done."""
        if self.patterns:
            return
        frozen = [name for name, parameter in pl_module.named_parameters() if not parameter.requires_grad]
        if not frozen:
            raise Refusal("callbacks.unfreeze: nothing is frozen, model.freeze=[...] freezes by parameter names")
        try:
            self.patterns = matching(self.epochs, frozen)
        except ValueError as error:
            raise Refusal(f"callbacks.unfreeze.epoch: of what is frozen {error}") from None
        trainer: Any = pl_module.trainer
        last, length, steps = max(self.epochs.values()), trainer.max_epochs, trainer.max_steps
        if last >= length:
            raise Refusal(f"callbacks.unfreeze.epoch={last}: this run ends after max_epochs={length}")
        before = last * trainer.datamodule.order.steps_per_epoch
        if 0 <= steps <= before:
            raise Refusal(f"callbacks.unfreeze.epoch={last}: begins after step {before}, and max_steps={steps}")

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        """No group is added to the optimizer: it has these parameters from the beginning, so that every schedule moves
        them and a run that goes on finds them where they were."""
        for name, pattern in self.patterns.items():
            if epoch >= self.epochs[pattern]:
                pl_module.get_parameter(name).requires_grad_(True)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Lightning's would put the optimizer's settings of that epoch back."""
        return {}
