"""Who computes which piece, by a table that changes while loader processes read it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from multiprocessing import RawArray

from lockstep.arithmetic.deal import Deal
from lockstep.arithmetic.layout import Layout

NEVER = (1 << 63) - 1  # a step that no run reaches


class MovingDeal(Deal):
    """Deal pieces by a table in shared memory: loader processes, which are forked before it changes, read it too.

    It has two rows, each a first step and the pieces of each device: those of the present steps, and those of steps
    that nobody has fetched yet.

    Args:
        layout: the run's, as which it begins.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        counts = layout.counts
        self._width = 1 + len(counts)
        self._table = RawArray("q", [0, *counts, NEVER, *counts])

    def layout_at(self, step: int) -> Layout:
        at = self._row(step)
        return dealt(self.layout, tuple(self._table[at + 1 : at + self._width]))

    def changes_after(self, step: int) -> bool:
        """Whether a change is entered for a step that comes after `step`."""
        return any(step < first < NEVER for first in self._table[:: self._width])

    def change(self, first: int, now: int, counts: Sequence[int]) -> None:
        """Deal the pieces anew from the step `first` on; there must be no change entered for a step after `now`.

        Args:
            first: a step that nobody has fetched.
            now: the step under way.
            counts: pieces of each device.
        """
        at = self._width - self._row(now)  # the other row
        self._table[at + 1 : at + self._width] = counts
        self._table[at] = first  # last: until here the row is that of a step long gone, or of none

    def _row(self, step: int) -> int:
        """Where the row begins that holds for a step: of those that begin before it, the later one."""
        first, second = self._table[0], self._table[self._width]
        return 0 if second > step or (first > second and first <= step) else self._width


@lru_cache(maxsize=16)
def dealt(layout: Layout, counts: tuple[int, ...]) -> Layout:
    """Return a layout with so many pieces for each device: one object for each `counts`."""
    return replace(layout, shares=tuple(map(float, counts)))
