"""Time between two steps that is not training time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def exclude_from_timing(trainer: Any) -> Iterator[None]:
    """Leave the time of this block out of the run's throughput: for callbacks that write between two steps.

    Args:
        trainer: the trainer, whose callbacks measure the time.
    """
    start = time.perf_counter()
    yield
    for callback in trainer.callbacks:
        if add := getattr(callback, "exclude_seconds", None):
            add(time.perf_counter() - start)
