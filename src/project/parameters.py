"""Which parameters are trained, from when on, and which of them decay."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim import Optimizer

from lockstep import UserError, join_names, match_patterns

LOG = logging.getLogger("lockstep")


def groups(module: nn.Module, decay_norms_and_biases: bool) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: weights decay as it says, norms and biases (one-dimensional) only if asked for
    (He et al., Bag of Tricks, 2019). Frozen ones are among them: without a gradient they stay, and may be unfrozen."""
    parameters = list(module.parameters())
    if decay_norms_and_biases:
        return [{"params": parameters}]
    weights = {"params": [p for p in parameters if p.ndim > 1]}
    others = {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}
    return [group for group in (weights, others) if group["params"]]


class Freeze(Callback):
    """Takes parameters out of training. A layer or block of which all are frozen computes as in evaluation: no dropout
    there, and running statistics stay.

    Args:
        module: has the parameters.
        patterns: of their names: `net.layer1.*`.

    Raises:
        ValueError: a pattern matches no name, or nothing is left to be trained.
    """

    def __init__(self, module: nn.Module, patterns: Sequence[str]) -> None:
        if isinstance(patterns, str):
            raise ValueError(f"freeze={patterns}: must be a list, freeze=[{patterns}]")
        named = dict(module.named_parameters())
        try:
            frozen = match_patterns(patterns, list(named))
        except ValueError as error:
            raise ValueError(f"freeze={list(patterns)}: {error}") from None
        if named and len(frozen) == len(named):
            raise ValueError(f"freeze={list(patterns)}: nothing is left to be trained")
        for name in frozen:
            named[name].requires_grad_(False)
        self.on_train_start(None, module)

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        for block in pl_module.modules():  # from the outer ones to the inner ones
            trained = [parameter.requires_grad for parameter in block.parameters()]
            if trained:
                block.train(any(trained))

    on_train_epoch_start = on_train_start  # a callback may have unfrozen something


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
            raise UserError("callbacks.unfreeze: nothing is frozen, model.freeze=[...] freezes by parameter names")
        try:
            self.patterns = match_patterns(self.epochs, frozen)
        except ValueError as error:
            raise UserError(f"callbacks.unfreeze.epoch: of what is frozen {error}") from None
        trainer: Any = pl_module.trainer
        last, length, steps = max(self.epochs.values()), trainer.max_epochs, trainer.max_steps
        before = last * trainer.datamodule.order.steps_per_epoch
        if last >= length and not 0 <= steps <= before:  # one that max_steps ends is a trial: a warning is enough
            raise UserError(f"callbacks.unfreeze.epoch={last}: this run ends after max_epochs={length}")
        if 0 <= steps <= before:
            LOG.warning(
                "callbacks.unfreeze.epoch=%d: begins after step %d, and max_steps=%d ends before", last, before, steps
            )

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        """No group is added to the optimizer: it has these parameters from the beginning, so that every schedule moves
        them and a run that goes on finds them where they were."""
        due = {name: pl_module.get_parameter(name) for name, at in self.patterns.items() if epoch >= self.epochs[at]}
        new = {name: parameter for name, parameter in due.items() if not parameter.requires_grad}
        for parameter in new.values():
            parameter.requires_grad_(True)
        if new and pl_module.global_rank == 0:
            size = sum(parameter.numel() for parameter in new.values())
            LOG.info(
                "epoch %d: %s parameters more are trained from now on: %s", epoch + 1, f"{size:,}", join_names(new, 6)
            )

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Lightning's would put the optimizer's settings of that epoch back."""
        return {}
