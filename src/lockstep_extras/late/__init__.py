"""`extras=[late]`: apply each gradient some steps later, so that its all-reduce runs while later steps compute.

This is the staleness of asynchronous SGD (Dean et al., Large scale distributed deep networks, 2012), but fixed. The
step alone determines which weights a gradient is applied to, so a run is repeatable and the same on every layout.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lockstep.config.extras import Extra, RunParts
from lockstep.text import plural

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from lockstep.config.check import Config
    from lockstep.step.gradients import GradientSum
    from lockstep.step.passes import StepPasses


class Late(Extra):
    """Apply each gradient some steps late.

    Args:
        steps: optimizer steps between the computation of a gradient and its use.
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps}: must be 1 or more")
        self.steps = steps

    @property
    def setting(self) -> str:
        return f"extras.late.steps={self.steps}"

    def conflicts(self, config: "Config") -> Iterable[tuple[str, str]]:
        layout = config.layout
        if layout.weights == "staged":
            yield f"strategy={layout.strategy}", "its stages sum no gradients over devices; leave late out"
        if layout.weights == "sharded":
            yield f"strategy={layout.strategy}", "a device has no whole gradient that could wait; strategy=ddp"
        if config.strategy.compression != "none":
            yield (
                f"strategy.compression={config.strategy.compression}",
                "only DDP's reducer compresses, and it does not send late gradients",
            )
        if any(getattr(extra, "separate_weights", False) for extra in config.extras.values()):
            yield "extras=[local_sgd]", "no gradient is sent"
        if config.nonfinite == "skip":
            yield "nonfinite=skip", "later steps depend on a late gradient before it can be checked"
        if config.precision == "16-mixed":
            yield "precision=16-mixed", "all steps share its loss scale; bf16-mixed"

    def notes(self, config: "Config", resumes: bool) -> Iterable[str]:
        yield f"late: gradients are applied {plural(self.steps, 'step')} late"
        if resumes:
            yield (
                f"{self.setting}: a checkpoint has the gradients that wait, except one of a run's end: if that run is "
                "made longer, its bits differ from those of a run of that length from the start"
            )

    def wrap_gradients(self, gradients: "GradientSum") -> "GradientSum":
        from lockstep_extras.late.sum import late_sum

        return late_sum(gradients, self.steps)

    def wrap_passes(self, passes: "StepPasses") -> "StepPasses":
        from lockstep.step.finite import FiniteGradientCheck
        from lockstep.step.strategy import proxy
        from lockstep_extras.late.sum import LatePasses

        for hook in passes.hooks:
            if isinstance(hook, FiniteGradientCheck):
                hook.skip_advice = ""
        return proxy(passes, LatePasses)

    def callbacks(self, parts: RunParts) -> Sequence["Callback"]:
        from lockstep_extras.late.sum import ApplyRemaining

        return [ApplyRemaining()]
