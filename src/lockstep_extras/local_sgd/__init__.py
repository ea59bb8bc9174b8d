"""`extras=[local_sgd]`: each process applies its own gradient, and the weights are averaged every few steps.

Stich, Local SGD converges fast and communicates little, 2019.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.config.extras import Extra, RunParts
from lockstep.text import plural

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from lockstep.config.check import Config
    from lockstep.step.gradients import GradientSum
    from lockstep.step.passes import StepPasses


class LocalSgd(Extra):
    """Averages the weights every few steps instead of summing gradients.

    Args:
        every: steps between averages. Each validation and each checkpoint has an average before it, too.

    Attributes:
        separate_weights: each process has its own gradient and its own weights; other extras ask for it.
    """

    separate_weights = True

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"every={every}: must be 1 or more")
        self.every = every
        self._averages: Any = None

    @property
    def setting(self) -> str:
        return f"extras.local_sgd.every={self.every}"

    def conflicts(self, config: "Config") -> Iterable[tuple[str, str]]:
        layout = config.layout
        if layout.strategy != "ddp":
            yield f"strategy={layout.strategy}", "each process must have its own weights; strategy=ddp"
        if layout.exact:
            yield "exact=true", "the result depends on the number of devices"
        if config.strategy.compression != "none":
            yield f"strategy.compression={config.strategy.compression}", "no gradient is sent"
        if config.nonfinite == "skip":
            yield "nonfinite=skip", "each process would decide for itself"
        if config.precision == "16-mixed":
            yield "precision=16-mixed", "all processes share its loss scale; bf16-mixed"

    def notes(self, config: "Config", resumes: bool) -> Iterable[str]:
        every = plural(self.every, "step")
        yield f"local_sgd: weights are averaged every {every}, so the result depends on the number of devices"
        if resumes:
            yield (
                f"{self.setting}: all ranks continue with rank zero's optimizer state, so the bits differ from a run "
                "that was never interrupted"
            )

    def wrap_gradients(self, gradients: "GradientSum") -> "GradientSum":
        from lockstep_extras.local_sgd.average import AverageWeights, LocalGradients

        self._averages = AverageWeights(self.every, self.setting)
        return LocalGradients(gradients.strategy, self._averages)

    def wrap_passes(self, passes: "StepPasses") -> "StepPasses":
        from lockstep.step.finite import FiniteGradientCheck

        for hook in passes.hooks:
            if isinstance(hook, FiniteGradientCheck):
                hook.skip_advice = ""
        return passes

    def callbacks(self, parts: RunParts) -> Sequence["Callback"]:
        return [self._averages]
