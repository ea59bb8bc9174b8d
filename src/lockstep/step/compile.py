"""`compile=true`: torch compiles a module's networks in place, for training only. Evaluation runs them uncompiled.

So torch compiles for the shape of a piece (and of the pieces of an epoch's short last step), and the names of weights
do not change. Shapes are never dynamic: the choice of a kernel would then depend on the shapes before. Dropout draws
the same numbers as without compilation.
"""

import logging
from typing import Any

import lightning.pytorch as pl
import torch

from lockstep.errors import UserError
from lockstep.step.network_parts import networks

SHAPES = 64  # compiled per network; torch's limit is 8 for all, and a ninth would run uncompiled, with other bits


def compile_networks(module: pl.LightningModule, exact: bool) -> None:
    """Compile the networks of a module in place. The compilation happens in each network's first training pass.

    torch caches the kernels on disk for later runs.

    Args:
        module: the module; see `networks`.
        exact: whether torch must not choose kernels by timing, since they may round differently.

    Raises:
        UserError: the module has no network, or this version of torch can't choose kernels without timing.
    """
    nets = list(networks(module))
    if not nets:
        raise UserError(f"compile=true: {type(module).__name__} has no layer with parameters: use compile=false")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # a warning about CUDA without a GPU
    import torch._dynamo
    import torch._inductor

    for limit in ("recompile_limit", "accumulated_recompile_limit"):  # each counts over all networks
        most = max(SHAPES * len(nets), getattr(torch._dynamo.config, limit))
        setattr(torch._dynamo.config, limit, most)
    torch._dynamo.config.optimize_ddp = False  # it splits a network at DDP's buckets, without a gain here
    options = {"fallback_random": True}
    if exact:
        if "deterministic" not in torch._inductor.list_options():
            remedy = "use torch 2.10 or newer, or exact=false"
            raise UserError(f"compile=true exact=true: torch {torch.__version__} chooses kernels by timing: {remedy}")
        options["deterministic"] = True
    for network in nets:
        network.compile(options=options, dynamic=False)


class EagerEvaluation(pl.Callback):
    """Run compiled networks uncompiled during validation and test."""

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        """Switch compiled code off."""
        torch.compiler.set_stance("force_eager")

    def on_validation_end(self, *args: Any, **kwargs: Any) -> None:
        """Switch compiled code on again."""
        torch.compiler.set_stance("default")

    on_test_start = on_validation_start
    on_test_end = on_validation_end
