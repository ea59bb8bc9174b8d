"""Who computes which piece at each step of a run."""

from lockstep.arithmetic.layout import Layout


class Deal:
    """Deal the pieces of every step alike.

    Extras may wrap it (`Extra.wrap_deal`) to deal them otherwise from some step on. All processes must then get the
    same layout for a step, and loader processes too, which were forked before and fetch several steps ahead.

    Args:
        layout: the run's.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def layout_at(self, step: int) -> Layout:
        """Return who computes which piece of an optimizer step (0-based, since the run began): the run's layout with
        other `shares` at most, and the same object for as long as they stay."""
        return self.layout
