"""One training step, whoever computes it. From Python: `from lockstep import compose, train`, see docs/library.md."""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.run.api import Composed, compose, train

__all__ = ["Composed", "compose", "train"]


began = time.time()  # of a command: this is the first that it imports


def __getattr__(name: str) -> Any:  # Hydra and torch take seconds that a mere import need not wait
    if name not in __all__:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    from lockstep.run import api as library

    return getattr(library, name)
