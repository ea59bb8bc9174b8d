"""`compile=true`: torch compiles a module's networks in place, for training only. Evaluation runs them uncompiled.

So torch compiles for the shape of a piece (and of the pieces of an epoch's short last step), and the names of weights
do not change. Shapes are never dynamic: the choice of a kernel would then depend on the shapes before. Dropout draws
the same numbers as without compilation.
"""

import logging
from typing import Any

import lightning.pytorch as pl
import torch

from lockstep.errors import StepRefused, UserError
from lockstep.launch.torch_versions import compile_network
from lockstep.step.hook import StepHook
from lockstep.step.network_parts import networks
from lockstep.step.step import Step

SHAPES = 64  # compiled per network; torch's limit is 8 for all, and a ninth would run uncompiled, with other bits


def compile_networks(module: pl.LightningModule, exact: bool, cuda_graphs: bool = False) -> None:
    """Compile the networks of a module in place. The compilation happens in each network's first training pass.

    torch caches the kernels on disk for later runs.

    Args:
        module: the module; see `networks`.
        exact: whether torch must not choose kernels by timing, since they may round differently.
        cuda_graphs: whether to record the passes of each network as CUDA graphs, see `CudaGraphs`.

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
    if cuda_graphs:  # torch's mode="reduce-overhead"; `or_error`: without it, it would run without graphs and a word
        options |= {"triton.cudagraphs": True, "triton.cudagraph_or_error": True}
    if exact:
        if "deterministic" not in torch._inductor.list_options():
            remedy = "use torch 2.10 or newer, or exact=false"
            raise UserError(f"compile=true exact=true: torch {torch.__version__} chooses kernels by timing: {remedy}")
        options["deterministic"] = True
    for network in nets:
        compile_network(network, options=options, dynamic=False)


class CudaGraphs(StepHook):
    """Lets a GPU repeat the passes of compiled networks as recorded CUDA graphs, which saves the launches of kernels.

    torch records a graph for each network and shape. A graph's results, gradients too, are in memory that the next step
    overwrites, so nothing may keep them.
    """

    def before_step(self, step: Step) -> None:
        """Let torch reuse the memory of the last step's results."""
        torch.compiler.cudagraph_mark_step_begin()

    def on_error(self, step: Step, error: Exception) -> None:
        """Raise torch's error about a graph in a line.

        Raises:
            StepRefused: torch can't record a graph, or something has kept a result of an earlier step.
        """
        text = str(error)
        if isinstance(error, RuntimeError) and "cudagraph" in text.lower():
            line = next(line for line in text.splitlines() if "cudagraph" in line.lower())
            reason = line.removeprefix("Error: ").partition(". Stack trace")[0][:160]
            raise StepRefused(f"speed.cuda_graphs=true: {reason}: give speed.cuda_graphs=false") from error


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
