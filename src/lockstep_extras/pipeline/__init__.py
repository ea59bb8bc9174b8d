"""`strategy=pipeline`: give each device a stage of the network, and send the pieces of a step through the stages."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lockstep.strategies import Strategy

if TYPE_CHECKING:
    from lockstep.arithmetic.layout import Layout
    from lockstep.step.gradients import GradientSum


class Pipeline(Strategy):
    """One process per device, each with one stage of the network.

    Args:
        split: the first part of the second and of each later stage, by number or name; None: cut by measured time.
    """

    name = "pipeline"
    weights = "staged"

    def __init__(self, split: tuple[int | str, ...] | None = None) -> None:
        super().__init__()
        self.split = split

    def conflicts(self, config: Any) -> Iterable[tuple[str, str, str]]:
        if config.layout.num_devices == 1:
            yield "strategy=pipeline", "devices=1", "a stage needs a device of its own; devices=2"
        if config.compile:
            yield "compile=true", "strategy=pipeline", "the layers of a stage run one by one; strategy=ddp"
        if config.precision.startswith("16-"):
            yield (
                "strategy=pipeline",
                f"precision={config.precision}",
                "the devices do not share a loss scale; bf16-mixed",
            )

    def build(self, layout: "Layout") -> "GradientSum":
        from lockstep.step.gradients import gradient_sum
        from lockstep_extras.pipeline.strategy import StagedStrategy

        return gradient_sum(StagedStrategy(self.split or ()), layout)
