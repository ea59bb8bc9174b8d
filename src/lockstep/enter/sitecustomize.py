"""Let the recorder enter a Python process, before its program starts: this folder is in PYTHONPATH.

It loads ../trace.py by its path, so Lockstep need not be installed where the program runs. Then it loads the
`sitecustomize` that this file stands before, if there is one.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def load_next() -> None:
    """Import the next `sitecustomize` on the path."""
    path, this = list(sys.path), sys.modules.pop("sitecustomize", None)
    sys.path[:] = [each for each in path if Path(each or ".").resolve() != HERE]
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError:
        if this is not None:
            sys.modules["sitecustomize"] = this
    finally:
        sys.path[:] = path


spec = importlib.util.spec_from_file_location("lockstep_trace", HERE.parent / "trace.py")
assert spec is not None
assert spec.loader is not None
recorder = importlib.util.module_from_spec(spec)
sys.modules["lockstep_trace"] = recorder
spec.loader.exec_module(recorder)
recorder.enter()
load_next()
