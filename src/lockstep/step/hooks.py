"""What takes part in each optimizer step beside its passes: the check for finite gradients, and extras."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.step.batch import MicroBatch
    from lockstep.step.passes import Step


class StepHook:
    """Is called at fixed places of each step, on every process. Nothing is done here: override what you need.

    The order of a step: `before_step`; for each piece of this process forward, backward and `after_piece`;
    `after_passes`; the gradient is summed over all processes; `before_optimizer_step`; the optimizer steps;
    `after_optimizer_step`.
    """

    def before_step(self, step: "Step") -> None:
        """Before the first pass."""

    def after_piece(self, step: "Step", micro_batch: "MicroBatch") -> None:
        """After a backward pass: the parameters have the gradient of this piece under exact=true; without it, the sum
        of the pieces so far."""

    def after_passes(self, step: "Step") -> None:
        """After the last pass, before `GradientSum.reduce`. May communicate: every process calls it, also one without a
        sample."""

    def before_optimizer_step(self, step: "Step") -> None:
        """After the sum: the parameters have the gradient of `step`, on every process that sums it the same."""

    def after_optimizer_step(self, step: "Step") -> None:
        """After the weights have changed."""

    def on_error(self, step: "Step", error: Exception) -> None:
        """After an error in the step's passes or sums. May raise another error that says more."""

    def before_weights_are_read(self) -> None:
        """Before a validation and before the weights are saved. Every process calls it."""

    def flush(self) -> None:
        """Wait for what is only known later, and raise what it says: before a checkpoint, at an epoch's end and at the
        run's end."""
