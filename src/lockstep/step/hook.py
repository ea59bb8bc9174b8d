"""What takes part in each step, at fixed places."""

from lockstep.step.step import Step


class StepHook:
    """Methods that are called at fixed places of each step, on every process. Override those that you need.

    What comes after the optimizer step, and before a validation or checkpoint, is for Lightning's callbacks.
    """

    def before_step(self, step: Step) -> None:
        """Act before the first pass."""

    def before_optimizer_step(self, step: Step) -> None:
        """Act after the sum: the parameters have the gradient of `step`, the same on all processes that share it."""

    def on_error(self, step: Step, error: Exception) -> None:
        """Act after an error in the step's passes or sums. It may raise an error with a better message instead."""

    def flush(self) -> None:
        """Wait for delayed results and raise their errors.

        Called before a checkpoint, at the end of an epoch and at the end of the run.
        """
