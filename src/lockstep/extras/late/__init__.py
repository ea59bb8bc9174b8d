"""`extras=[late]`: a gradient is applied some steps later, while its sum over devices is under way.

That is the staleness of asynchronous SGD (Dean et al., Large scale distributed deep networks, 2012), but a fixed one:
which gradient meets which weights follows from the step alone, so a run is repeatable, and the same on every layout.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.config.extras import Extra, RunParts
from lockstep.text import plural

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from lockstep.config.check import Config
    from lockstep.step.gradients import GradientSum
    from lockstep.step.hooks import StepHook


class Late(Extra):
    """Apply each gradient some steps late.

    Args:
        steps: between the passes of a gradient and its use.
    """

    can_skip = False

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps}: must be 1 or more")
        self.steps = steps
        self._sum: Any = None

    @property
    def setting(self) -> str:
        return f"extras.late.steps={self.steps}"

    def conflicts(self, config: "Config") -> Iterable[tuple[str, str]]:
        layout = config.layout
        if layout.staged:
            yield f"strategy={layout.strategy}", "its gradients are sent to nobody; leave late out"
        if config.strategy.compression != "none":
            yield (
                f"strategy.compression={config.strategy.compression}",
                "a late gradient is sent by itself, and not by DDP, which compresses",
            )
        if any(extra.separate_weights for extra in config.extras.values()):
            yield "extras=[local_sgd]", "no gradient is sent"
        if config.nonfinite == "skip":
            yield "nonfinite=skip", "other steps have built on it by then"
        if config.precision == "16-mixed":
            yield "precision=16-mixed", "its loss scale is one for all; bf16-mixed"

    def describe(self) -> str:
        return f"gradients applied {plural(self.steps, 'step')} late"

    def notes(self, config: "Config", resumes: bool) -> Iterable[str]:
        if resumes:
            yield (
                f"{self.setting}: a run that had ended has applied all its gradients, so one that is made longer does "
                "not end with the bits of one that was as long from the start"
            )

    def wrap_gradients(self, gradients: "GradientSum") -> "GradientSum":
        from lockstep.extras.late.sum import LateSum

        self._sum = LateSum(gradients, self.steps)
        return self._sum

    def step_hooks(self, parts: RunParts) -> Sequence["StepHook"]:
        from lockstep.extras.late.sum import LateSteps

        return [LateSteps(self._sum)]

    def callbacks(self, parts: RunParts) -> Sequence["Callback"]:
        from lockstep.extras.late.sum import ApplyRemaining

        return [ApplyRemaining(self._sum)]
