"""How often something costly may happen beside training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SHARE = 0.02  # of the run's time that one kind of costly thing may take


class Pace:
    """Lets something happen at most once in `seconds`, and more rarely where it would take more than SHARE of the time.

    The first time is free.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._next = 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Times the block inside."""
        start = time.monotonic()
        yield
        now = time.monotonic()
        self._next = now + max(self.seconds, (now - start) / SHARE)
