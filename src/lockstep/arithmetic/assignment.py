"""The assignment of each step's pieces to devices."""

from lockstep.arithmetic.layout import Layout


class Assignment:
    """Assigns the pieces of every step as the run's layout does.

    An extra may replace it (`Extra.wrap_assignment`) to assign the pieces of later steps otherwise. All processes must
    then get the same layout for a step, also loader processes, which are forked earlier and fetch several steps ahead.

    Args:
        layout: the run's layout.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def layout_at(self, step: int) -> Layout:
        """Return the layout of an optimizer step.

        Args:
            step: the number of the step since the run began, 0-based.

        Returns:
            The run's layout, maybe with other `shares`; the same object as long as they do not change.
        """
        return self.layout
