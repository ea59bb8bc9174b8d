"""`compile`: what goes with it and what it needs, checked before anything starts."""

import os
import shlex
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

GRAPHS = {"reduce-overhead": "true", "max-autotune": "max-autotune-no-cudagraphs"}  # and what does without


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
