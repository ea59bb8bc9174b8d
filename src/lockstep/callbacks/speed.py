"""How fast this process has trained so far."""

from __future__ import annotations

import time


class Speed:
    """Samples a second, by a clock that stands still while something else than training runs.

    Args:
        warmup: optimizer steps that are left out (kernels are chosen, memory grows), once as many again have been made.

    Attributes:
        steps: optimizer steps counted.
    """

    def __init__(self, warmup: int) -> None:
        self.steps = 0
        self._warmup = warmup
        self._samples = 0
        self._end = 0.0  # when the last step ended
        self._marks: list[tuple[float, int]] = []  # clock and samples after the first step, and after the warm-up
        self._away = 0.0  # seconds not spent in training
        self._left = 0.0

    def now(self) -> float:
        """The clock, in seconds."""
        return time.perf_counter() - self._away

    def leave(self) -> None:
        """Training pauses."""
        self._left = time.perf_counter()

    def come_back(self) -> None:
        """Training goes on."""
        self._away += time.perf_counter() - self._left

    def count(self, samples: int) -> None:
        """A step of so many samples has ended."""
        self.steps += 1
        self._samples += samples
        self._end = self.now()
        if self.steps in (1, self._warmup):
            self._marks.append((self._end, self._samples))

    @property
    def samples_per_second(self) -> float | None:
        """None before two steps."""
        if self.steps < 2:
            return None
        clock, samples = self._marks[-1] if self.steps >= 2 * self._warmup else self._marks[0]
        return (self._samples - samples) / max(self._end - clock, 1e-9)
