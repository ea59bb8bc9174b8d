"""`compile`: a module's networks are compiled by torch for training, in place; evaluation runs them as they are.

So one shape is compiled, the piece's (and that of an epoch's short tail), and what is tested or exported is the network
that the checkpoint names: names of weights, checkpoints and `exact` stay. Shapes are never dynamic: which kernel runs
would depend on what came before. Dropout draws what it draws uncompiled.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.scratch import outside
from lockstep.launch.watchdog import compiling

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import nn

GRAPHS = {"reduce-overhead": "true", "max-autotune": "max-autotune-no-cudagraphs"}  # and what does without
SHAPES = 64  # for each network; torch's own 8 for all would send the ninth down the slow path, and to other bits


def lacking(accelerator: str) -> str | None:
    """What this machine lacks to compile: otherwise torch would tell in the first step, on a page."""
    if accelerator == "gpu":
        if find_spec("triton") is None:
            return "triton, which is not installed: pip install triton"
        kind, key, usual = "C", "CC", ["gcc", "clang"]  # as triton looks for it
    else:
        kind, key, usual = "C++", "CXX", [{"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")]
    named = shlex.split(os.environ.get(key, ""))[:1] or usual
    if not any(map(shutil.which, named)):
        return f"a {kind} compiler, and there is no {' or '.join(named)} on the PATH; {key} names another"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return None if headers.is_file() else f"Python's headers, {headers} (the package python3-dev, say)"


def compile_networks(module: pl.LightningModule, mode: str, exact: bool) -> None:
    """Compiles the networks of a module, each in its first pass in training. The kernels are kept for later runs.

    Args:
        mode: torch.compile's.
        exact: no choice is made by timing.

    Raises:
        Refusal: there is no network.
    """
    found = list(networks(module))
    if not found:
        raise Refusal(f"compile: {type(module).__name__} has no layer with parameters to be compiled; compile=false")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # of a CUDA toolkit without a GPU
    with outside():  # else kernels, and headers that take 10 s to prepare, would go where the run's own files go
        import torch._dynamo
        import torch._inductor.codecache
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        cache_dir()  # sets TORCHINDUCTOR_CACHE_DIR, where it is not set
    for limit in ("recompile_limit", "accumulated_recompile_limit"):  # all networks share them
        most = max(SHAPES * len(found), getattr(torch._dynamo.config, limit))
        setattr(torch._dynamo.config, limit, most)
    torch._dynamo.on_compile_start(lambda _: compiling(True))
    torch._dynamo.on_compile_end(lambda _: compiling(False))
    options = {**torch._inductor.list_mode_options(mode), "fallback_random": True, "deterministic": exact}
    for network in found:
        network.compile(options=options, dynamic=False)
        network._compiled_call_impl = partial(_in_training, network, network._compiled_call_impl)


def networks(module: nn.Module) -> Iterator[nn.Module]:
    """The children that have parameters; of a list or dict of modules, which is never called itself, its members."""
    from torch import nn

    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from networks(child)
        elif any(True for _ in child.parameters()):
            yield child


def is_compiled(module: nn.Module) -> bool:
    """Whether a network of the module is."""
    return any(network._compiled_call_impl is not None for network in networks(module))


def _in_training(network: nn.Module, compiled: Any, *args: Any, **kwargs: Any) -> Any:
    return (compiled if network.training else network._call_impl)(*args, **kwargs)
