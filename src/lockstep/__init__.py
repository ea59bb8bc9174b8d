"""One training step, whoever computes it. From Python: `from lockstep import compose, train`, see docs/library.md."""

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.run.api import Composed, compose, train

__all__ = ["Composed", "compose", "train"]


began = time.time()  # of a command: this is the first that it imports
# libgomp reads it once, when torch is imported: threads that wait for each other sleep after 1,000 turns, not 300,000,
# which would take a busy machine's cores (docs/decisions/threads.md). A policy that the user has set stays as it is.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def __getattr__(name: str) -> Any:  # Hydra and torch take seconds that a mere import need not wait
    if name not in __all__:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    from lockstep.run import api as library

    return getattr(library, name)
