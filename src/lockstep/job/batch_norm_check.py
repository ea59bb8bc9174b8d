"""Refuse runs in which BatchNorm would get one value per channel.

BatchNorm needs two values per channel to compute a variance. The smallest piece of a step may have one sample.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.arithmetic.layout import Layout
from lockstep.config.check import Config
from lockstep.config.run_length import smallest_piece
from lockstep.data import Splits
from lockstep.data.datasets import fetch
from lockstep.errors import UserError
from lockstep.text import plural

SINGLE_VALUE_TEXT = "Expected more than 1 value per channel"  # in torch's error message


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
    modes = {each: each.training for each in module.modules()}
    hooks = [layer.register_forward_pre_hook(see) for layer in layers]
    module.eval()
    try:
        with torch.no_grad(), isolate_rng(include_cuda=False):
            x = fetch(splits.train, np.zeros(1, dtype=np.int64))[0]
            if isinstance(x, Tensor) and (x.dtype == torch.uint8 or x.is_floating_point()) and parameter is not None:
                x = x.to(parameter)
            module(x)
    except Exception:  # a user's forward may need other arguments
        return 0
    finally:
        for hook in hooks:
            hook.remove()
        for each, mode in modes.items():
            each.training = mode
    return min(seen, default=0)


def single_value_error(config: Config, samples: int) -> UserError:
    """Return an error that names the nearest batch sizes and numbers of pieces that fit."""
    layout = config.layout
    tail, last = samples % layout.batch_size, ""
    if layout.batch_size // layout.pieces > 1:
        last = f"an epoch's last step has {tail} of {plural(samples, 'sample')}, so "
    fits = [*_sizes(config, samples), *_pieces(config, samples)]
    remedy = f"use {' or '.join(fits) or 'another normalisation'}"
    return UserError(
        f"batch_size={layout.batch_size} in {layout.pieces} pieces: {last}a piece has one sample, and a BatchNorm "
        f"layer gets one value per channel, which has no variance: {remedy}"
    )


def _sizes(config: Config, samples: int) -> Iterator[str]:
    """Yield the nearest smaller and the nearest larger `batch_size` that fit, as overrides."""
    size, pieces = config.layout.batch_size, config.layout.pieces
    for sizes in (range(size - pieces, 0, -pieces), range(size + pieces, samples + 1, pieces)):
        fitting = (each for each in sizes if _fits(config, replace(config.layout, batch_size=each), samples))
        yield from (f"batch_size={each}" for each in islice(fitting, 1))


def _pieces(config: Config, samples: int) -> Iterator[str]:
    """Yield the nearest smaller number of pieces that fits, as an override."""
    layout = config.layout
    for pieces in range(layout.pieces - 1, layout.num_devices - 1, -1):
        if layout.batch_size % pieces == 0 and _fits(config, replace(layout, pieces=pieces), samples):
            each, rest = divmod(pieces, layout.num_devices)
            accumulated = "accumulate_grad_batches" in config.overridden and not rest
            yield f"accumulate_grad_batches={each}" if accumulated else f"pieces={pieces}"
            return


def _fits(config: Config, layout: Layout, samples: int) -> bool:
    """Check whether all pieces of the run would have several samples with another layout."""
    return smallest_piece(replace(config, layout=layout), samples) > 1
