"""Hooks of an optimizer step: the check for finite gradients is one, and extras add theirs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.step.batch import MicroBatch
    from lockstep.step.passes import Step


class StepHook:
    """Methods that are called at fixed places of each step, on every process. Override those that you need.

    The order of a step: `before_step`; for each piece of this process its forward pass, its backward pass and
    `after_piece`; `after_passes`; the sum of the gradient over all processes; `before_optimizer_step`; the optimizer
    step; `after_optimizer_step`.
    """

    def before_step(self, step: "Step") -> None:
        """Act before the first pass."""

    def after_piece(self, step: "Step", micro_batch: "MicroBatch") -> None:
        """Act after a backward pass.

        With exact=true, the parameters have the gradient of this piece. Otherwise they have the sum of the pieces so
        far.
        """

    def after_passes(self, step: "Step") -> None:
        """Act after the last pass, before `GradientSum.reduce`.

        It may communicate, since every process calls it, also one without a sample.
        """

    def before_optimizer_step(self, step: "Step") -> None:
        """Act after the sum: the parameters have the gradient of `step`, the same on all processes that share it."""

    def after_optimizer_step(self, step: "Step") -> None:
        """Act after the weights have changed."""

    def on_error(self, step: "Step", error: Exception) -> None:
        """Act after an error in the step's passes or sums. It may raise an error with a better message instead."""

    def before_weights_are_read(self) -> None:
        """Act before a validation and before the weights are saved. Every process calls this."""

    def flush(self) -> None:
        """Wait for delayed results and raise their errors.

        Called before a checkpoint, at the end of an epoch and at the end of the run.
        """
