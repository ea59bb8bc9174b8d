"""Optimizers by name, with weight decay only where it belongs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.arithmetic.layout import Refusal
from lockstep.run.checks import fraction, real, several
from lockstep.run.targets import build

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def build_optimizer(
    module: nn.Module,
    lr: float,
    name: str | None = None,
    weight_decay: float = 0.0,
    _target_: str | None = None,
    _partial_: bool = True,
    **options: Any,
) -> torch.optim.Optimizer:
    """Optimizer `name`, or the one that `_target_` names, over the trainable parameters; options are its own.

    Biases and norms (one-dimensional parameters) do not decay: He et al., Bag of Tricks, 2019.
    Refusal: unknown name or option, or a value that torch does not take.
    """
    if _target_ is None and name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise Refusal(f"optimizer={name}: unknown, one of {known}; a _target_ names any other: docs/own.md")
    fraction("optimizer.momentum", options.get("momentum", 0))
    real(least=0)("optimizer.weight_decay", weight_decay)
    if "betas" in options and len(several(fraction)("optimizer.betas", options["betas"])) != 2:
        raise Refusal(f"optimizer.betas={options['betas']}: must be two numbers")
    trained = [p for p in module.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if _target_ is not None:
        decay = {"weight_decay": weight_decay} if weight_decay else {}  # some take none
        make = build("optimizer", {"_target_": _target_, "_partial_": True, **decay, **options})
    else:
        make = partial(OPTIMIZERS[str(name)], **options)
    try:
        return make([g for g in groups if g["params"]], lr=lr)
    except (TypeError, ValueError) as error:
        raise Refusal(f"optimizer={_target_ or name}: {error}") from error
