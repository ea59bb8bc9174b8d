"""An assignment of pieces to devices that can change while loader processes read it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from multiprocessing import RawArray

from lockstep.arithmetic.layout import Assignment, Layout

NEVER = (1 << 63) - 1  # a step that no run reaches


class MovingAssignment(Assignment):
    """Assigns pieces by a table in shared memory, so that loader processes that were forked earlier see changes too.

    The table has two rows, one for the present steps and one for later steps that no process has fetched yet. A row is
    its first step and the number of pieces of each device.

    Args:
        layout: the run's layout, which holds until the first change.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        counts = layout.counts
        self._width = 1 + len(counts)
        self._table = RawArray("q", [0, *counts, NEVER, *counts])

    def layout_at(self, step: int) -> Layout:
        at = self._row(step)
        return with_counts(self.layout, tuple(self._table[at + 1 : at + self._width]))

    def changes_after(self, step: int) -> bool:
        """Check whether a change is entered for a step after `step`."""
        return any(step < first < NEVER for first in self._table[:: self._width])

    def change(self, first: int, now: int, counts: Sequence[int]) -> None:
        """Change the number of pieces of each device.

        There must be no earlier change that is still to come: `changes_after(now)` must be False.

        Args:
            first: the first step that the change applies to; no process has fetched it.
            now: the current step.
            counts: pieces of each device.
        """
        at = self._width - self._row(now)  # the other row
        self._table[at + 1 : at + self._width] = counts
        self._table[at] = first  # last, because until now no reader uses this row

    def _row(self, step: int) -> int:
        """Return the index of the row for a step: of the rows that begin at or before it, the later one."""
        first, second = self._table[0], self._table[self._width]
        return 0 if second > step or (first > second and first <= step) else self._width


@lru_cache(maxsize=16)
def with_counts(layout: Layout, counts: tuple[int, ...]) -> Layout:
    """Return a layout with this number of pieces for each device; the same object for the same `counts`."""
    return replace(layout, shares=tuple(map(float, counts)))
