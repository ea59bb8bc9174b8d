"""What the callbacks that draw share: TensorBoard's loggers, and how often something costly may happen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger

SHARE = 0.02  # of the run's time that one kind of costly thing may take


def boards(trainer: Trainer) -> list[TensorBoardLogger]:
    """The Trainer's TensorBoard loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


class Pace:
    """Lets something happen at most once in `seconds`, and more rarely where it would take more than SHARE of the time.

    The first time is free.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
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
        self._next = now + max(self._seconds, (now - start) / SHARE)
