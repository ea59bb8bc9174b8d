"""`strategy=pipeline`: give each device a stage of the network, and send the pieces of a step through the stages."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.strategies import Action, Strategy

if TYPE_CHECKING:
    from lockstep.arithmetic.layout import Layout
    from lockstep.step.batch import MicroBatch
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

    def schedule(self, micro_batches: "Sequence[MicroBatch]") -> Iterator[tuple[Action, int]]:
        """Yield the passes of 1F1B: a stage with r stages after it, that of device r, runs r forward passes ahead."""
        count = len(micro_batches)
        pieces_ahead = min(micro_batches[0].device, count) if count else 0
        for index in range(count):
            yield Action.FORWARD, index
            if index >= pieces_ahead:
                yield Action.BACKWARD, index - pieces_ahead
        for index in range(count - pieces_ahead, count):
            yield Action.BACKWARD, index

    def build(self, layout: "Layout") -> "GradientSum":
        from lockstep.step.gradients import gradient_sum
        from lockstep_extras.pipeline.strategy import StagedStrategy

        return gradient_sum(StagedStrategy(layout, self.schedule, self.split or ()), layout)
