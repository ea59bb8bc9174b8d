"""`compile`: what goes with it and what it needs, checked before anything starts."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.arithmetic.layout import Refusal
from lockstep.run.checks import show

GRAPHS = {"reduce-overhead": "true", "max-autotune": "max-autotune-no-cudagraphs"}  # and what does without
MODES = ("default", "max-autotune-no-cudagraphs", *GRAPHS)


def mode(key: str, value: Any) -> str | None:
    """torch.compile's mode, None for false."""
    if isinstance(value, bool):
        return "default" if value else None
    if value not in MODES:
        raise Refusal(f"{key}={show(value)}: must be true, false, or a mode of torch.compile: {', '.join(MODES)}")
    return str(value)


def must_work(values: Mapping[str, Any]) -> None:
    """Checks what goes with `compile`; `values` are the config's, checked one by one.

    Raises:
        Refusal: something does not, or this machine has no compiler.
    """
    found = values["compile"]
    if found is None:
        return
    asked = f"compile={'true' if found == 'default' else found}"
    if values["strategy"]["name"] == "dp":
        raise Refusal(f"{asked}: strategy=dp gives a network other devices' weights, a compiled one has its own; ddp")
    if values["strategy"]["sync_batchnorm"]:
        raise Refusal(f"{asked}: strategy.sync_batchnorm=true waits for other ranks inside a network; leave one out")
    if found in GRAPHS and values["accelerator"] == "cpu":
        raise Refusal(f"{asked}: CUDA graphs need a GPU; compile={GRAPHS[found]} does without them")
    if found in GRAPHS and values["accumulate_grad_batches"] == "auto":
        raise Refusal(
            f"accumulate_grad_batches=auto: CUDA graphs don't give memory back, so not with {asked}; compile=true"
        )
    if found.startswith("max-autotune") and values["exact"]:
        raise Refusal(f"{asked} chooses kernels by their speed, so not with exact=true; compile=true")
    if values["memory_budget"] and values["accelerator"] == "cpu":
        raise Refusal(f"memory_budget on a CPU counts tensors, and {asked} hides them: leave one of the two out")
    if reason := _lacking(values["accelerator"]):
        raise Refusal(f"{asked} needs {reason}")


def _lacking(accelerator: str) -> str | None:
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
