"""Time between two steps that is not spent waiting for data."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def exclude_from_timing(trainer: Any) -> Iterator[None]:
    """Leave the time of this block out of what the run measures: for callbacks that write between two steps."""
    start = time.perf_counter()
    yield
    for callback in trainer.callbacks:
        if add := getattr(callback, "exclude_seconds", None):
            add(time.perf_counter() - start)
