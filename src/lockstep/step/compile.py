"""`compile`: a module's networks are compiled by torch for training, in place; evaluation runs them as they are.

So one shape is compiled, the piece's (and that of an epoch's short tail), and what is tested or exported is the network
that the checkpoint names: names of weights, checkpoints and `exact` stay. Shapes are never dynamic: which kernel runs
would depend on what came before. Dropout draws what it draws uncompiled.
"""

import logging
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lockstep.errors import UserError

SHAPES = 64  # for each network; torch's own 8 for all would send the ninth down the slow path, and to other bits


def compile_networks(module: pl.LightningModule, exact: bool) -> None:
    """Compiles the networks of a module, each in its first pass in training. The kernels are kept for later runs.

    Args:
        exact: no choice is made by timing.

    Raises:
        UserError: there is no network.
    """
    nets = list(networks(module))
    if not nets:
        raise UserError(f"compile: {type(module).__name__} has no layer with parameters to be compiled; compile=false")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # of a CUDA toolkit without a GPU
    import torch._dynamo

    for limit in ("recompile_limit", "accumulated_recompile_limit"):  # all networks share them
        most = max(SHAPES * len(nets), getattr(torch._dynamo.config, limit))
        setattr(torch._dynamo.config, limit, most)
    torch._dynamo.config.optimize_ddp = False  # it cuts a network where DDP's buckets end: no gain, where pieces add up
    options = {"fallback_random": True, "deterministic": exact}
    for network in nets:
        network.compile(options=options, dynamic=False)


def networks(module: nn.Module) -> Iterator[nn.Module]:
    """The children that have parameters; of a list or dict of modules, which is never called itself, its members."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from networks(child)
        elif any(True for _ in child.parameters()):
            yield child


class EagerEvaluation(pl.Callback):
    """Runs compiled networks as they are while they are evaluated."""

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        torch.compiler.set_stance("force_eager")

    def on_validation_end(self, *args: Any, **kwargs: Any) -> None:
        torch.compiler.set_stance("default")

    on_test_start = on_validation_start
    on_test_end = on_validation_end
