"""Choose which parameters decay, and freeze and unfreeze parameters by name."""

import difflib
import fnmatch
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim import Optimizer

from lockstep.errors import UserError
from lockstep.text import join_names

LOG = logging.getLogger("lockstep")


def match_patterns(patterns: Iterable[str], names: Sequence[str]) -> dict[str, str]:
    """Return the last pattern that each name matches. Names without a match are left out.

    Args:
        patterns: shell patterns such as `net.layer?.*`.
        names: names of parameters.

    Raises:
        ValueError: a pattern matches no name.
    """
    pattern_of: dict[str, str] = {}
    for pattern in patterns:
        matching = [name for name in names if fnmatch.fnmatchcase(name, str(pattern))]
        if not matching:
            near = difflib.get_close_matches(str(pattern), names, n=1) or [f"{names[0]} to {names[-1]}"]
            raise ValueError(f"{pattern} matches no parameter's name; there is {near[0]}")
        pattern_of |= dict.fromkeys(matching, pattern)
    return pattern_of


def groups(module: nn.Module, decay_norms_and_biases: bool) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer.

    Weights decay; norms and biases (one-dimensional) decay only with `decay_norms_and_biases` (He et al., Bag of
    Tricks, 2019). Frozen parameters are in the groups too. They do not change without a gradient, and may be unfrozen
    later.
    """
    parameters = list(module.parameters())
    if decay_norms_and_biases:
        return [{"params": parameters}]
    weights = {"params": [p for p in parameters if p.ndim > 1]}
    others = {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}
    return [group for group in (weights, others) if group["params"]]


class Freeze(Callback):
    """Freezes parameters.

    If all parameters of a layer or block are frozen, it computes as in evaluation: without dropout, and with fixed
    running statistics.

    Args:
        module: the module with the parameters.
        patterns: patterns of their names, `net.layer1.*`.
        train_only: instead of `patterns`: patterns of the names of all other parameters.

    Attributes:
        names: the names of the parameters that it has frozen.

    Raises:
        ValueError: A pattern matches no name, no parameter is left to train or to freeze, or both are given.
    """

    def __init__(self, module: nn.Module, patterns: Sequence[str], train_only: Sequence[str] = ()) -> None:
        option = "train_only" if train_only else "freeze"
        chosen = train_only or patterns
        if isinstance(chosen, str):
            raise ValueError(f"{option}={chosen}: must be a list, {option}=[{chosen}]")
        if train_only and patterns:
            raise ValueError(f"{option}={list(chosen)}: freeze={list(patterns)} is given too: give one of them")
        named = dict(module.named_parameters())
        try:
            matched = match_patterns(chosen, list(named))
        except ValueError as error:
            raise ValueError(f"{option}={list(chosen)}: {error}") from None
        if named and len(matched) == len(named):
            raise ValueError(f"{option}={list(chosen)}: no parameter is left to {'freeze' if train_only else 'train'}")
        self.names = [name for name in named if chosen and (name in matched) != bool(train_only)]
        for name in self.names:
            named[name].requires_grad_(False)
        self.on_train_start(None, module)

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        for block in pl_module.modules():  # from the outer ones to the inner ones
            trained = [parameter.requires_grad for parameter in block.parameters()]
            if trained:
                block.train(any(trained))

    on_train_epoch_start = on_train_start  # another callback may have unfrozen parameters


class Unfreeze(BaseFinetuning):
    """Unfreezes the module's frozen parameters from some epoch on. They keep their factor of `optimizer.lr_scale`.

    Args:
        epoch: passes over the training set before that; or such a number for patterns of parameter names,
            `{net.*: 4, net.layer4.*: 2}`. The last pattern that matches a name counts.
    """

    def __init__(self, epoch: int | Mapping[str, int] = 1) -> None:
        super().__init__()
        self.epochs = dict(epoch) if isinstance(epoch, Mapping) else {"*": epoch}
        if not all(type(each) is int and each >= 1 for each in self.epochs.values()):
            raise ValueError(f"epoch={epoch}: must be whole numbers of at least 1")
        self.trains_later = list(self.epochs)  # see docs/use/own-model.md
        self.patterns: dict[str, str] = {}  # by parameter name: the pattern that matches it

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        """Find the frozen parameters. The module has frozen them already."""
        if self.patterns:
            return
        frozen = [name for name, parameter in pl_module.named_parameters() if not parameter.requires_grad]
        if not frozen:
            raise UserError(
                "callbacks.unfreeze: no parameter is frozen: give model.freeze=[...] or model.train_only=[...]"
            )
        try:
            self.patterns = match_patterns(self.epochs, frozen)
        except ValueError as error:
            raise UserError(f"callbacks.unfreeze.epoch: among the frozen parameters {error}") from None
        trainer: Any = pl_module.trainer
        last, length, steps = max(self.epochs.values()), trainer.max_epochs, trainer.max_steps
        before = last * trainer.datamodule.order.steps_per_epoch
        if last >= length and not 0 <= steps <= before:  # a run with max_steps is a trial: warn only
            raise UserError(f"callbacks.unfreeze.epoch={last}: must be less than max_epochs={length}")
        if 0 <= steps <= before:
            LOG.warning(
                "callbacks.unfreeze.epoch=%d: begins after step %d, but max_steps=%d ends the run", last, before, steps
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Unfreeze what is due. No state is noted, since `state_dict` returns none."""
        for optimizer in trainer.optimizers:
            self.finetune_function(pl_module, trainer.current_epoch, optimizer)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the parameters that are due.

        The optimizer has these parameters from the beginning, so no group is added. So every schedule applies to them,
        and a resumed run finds the same groups.
        """
        due = {name: pl_module.get_parameter(name) for name, at in self.patterns.items() if epoch >= self.epochs[at]}
        new = {name: parameter for name, parameter in due.items() if not parameter.requires_grad}
        for parameter in new.values():
            parameter.requires_grad_(True)
        if new and pl_module.global_rank == 0:
            size = sum(parameter.numel() for parameter in new.values())
            LOG.info(
                "epoch %d: %s more parameters are trained from now on: %s", epoch + 1, f"{size:,}", join_names(new, 6)
            )

    def state_dict(self) -> dict[str, Any]:
        """Return no state: Lightning would restore the optimizer's settings of an earlier epoch from it."""
        return {}
