"""What stands around the methods of a Trainer that a config makes. This module imports neither torch nor Lightning."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Run:
    """What a run does before and after the methods of its Trainer: here nothing. `lockstep.Job` is one that does."""

    def skips_fit(self) -> bool:
        """Return whether a call of `trainer.fit` has nothing to do."""
        return False

    @contextmanager
    def around_fit(self, ckpt_path: Any) -> Iterator[Any]:
        """Do what belongs to each `trainer.fit`, before and after it. Yield the checkpoint from which it continues."""
        yield ckpt_path

    @contextmanager
    def around_test(self, ckpt_path: Any) -> Iterator[None]:
        """Do what belongs to each `trainer.test`, before and after it."""
        yield
