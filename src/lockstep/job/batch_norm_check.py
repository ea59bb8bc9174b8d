"""Refuse runs in which BatchNorm would get one value per channel.

BatchNorm needs two values per channel to compute a variance. The smallest piece of a step may have one sample.
"""

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.config import rules
from lockstep.config.check import Config
from lockstep.config.run_length import smallest_piece
from lockstep.data import Splits
from lockstep.data.datasets import fetch
from lockstep.errors import UserError
from lockstep.step.trial import modes_restored


def check_batch_norms(config: Config, splits: Splits, module: pl.LightningModule) -> None:
    """Refuse a run in which a BatchNorm layer would get one value per channel in a piece of one sample.

    The module's `forward` runs on one sample in evaluation mode, which changes nothing. Where that raises, the run is
    refused at the training step instead, see `single_value_error`.
    """
    samples = len(splits.train)
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.training]
    if layers and smallest_piece(config, samples) == 1 and _values_per_channel(module, layers, splits) == 1:
        raise single_value_error(config, samples)


def _values_per_channel(module: pl.LightningModule, layers: list[_BatchNorm], splits: Splits) -> int:
    """Return the fewest values per channel that any of the layers gets from one sample; 0 if `forward` raises."""
    seen: list[int] = []

    def see(layer: nn.Module, args: Any) -> None:
        seen.append(args[0].numel() // args[0].shape[1])

    parameter = next((each for each in module.parameters() if each.is_floating_point()), None)
    hooks = [layer.register_forward_pre_hook(see) for layer in layers]
    try:
        with modes_restored(module), torch.no_grad(), isolate_rng(include_cuda=False):
            module.eval()
            x = fetch(splits.train, np.zeros(1, dtype=np.int64))[0]
            if isinstance(x, Tensor) and (x.dtype == torch.uint8 or x.is_floating_point()) and parameter is not None:
                x = x.to(parameter)
            module(x)
    except Exception:  # a user's forward may need other arguments
        return 0
    finally:
        for hook in hooks:
            hook.remove()
    return min(seen, default=0)


def single_value_error(config: Config, samples: int) -> UserError:
    """Return an error that names the nearest batch sizes and numbers of pieces that fit."""
    return rules.single_value_error(
        config.layout,
        samples,
        lambda layout: smallest_piece(replace(config, layout=layout), samples) > 1,
        "accumulate_grad_batches" in config.overridden,
    )
