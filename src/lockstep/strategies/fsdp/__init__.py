"""`strategy=fsdp`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from lockstep.arithmetic.layout import Layout
from lockstep.strategies.strategy import RunSettings, Strategy

if TYPE_CHECKING:
    from lockstep.step.gradients import GradientSum


class FSDP(Strategy):
    """A process per device, each with a part of the weights, gradients and optimizer state (torch's `fully_shard`).

    Args:
        shares: relative number of pieces of each device, in rank order; None: equal shares.
        reshard: free the gathered weights of each block after its forward pass, and gather them again for its backward
            pass. False: keep them until the step's last backward pass.
        offload: keep each device's part in the host's memory.
        blocks: pattern of the names of the modules that are gathered one after the other, such as `net.blocks.*`; None:
            the repeated modules.
        checkpoint: `whole`: rank zero gathers and writes one file; `sharded`: each process writes its part, to a
            folder beside a small file.
    """

    name = "fsdp"
    weights = "sharded"

    def __init__(
        self,
        shares: tuple[float, ...] | None = None,
        reshard: bool = False,
        offload: bool = False,
        blocks: str | None = None,
        checkpoint: Literal["whole", "sharded"] = "whole",
    ) -> None:
        super().__init__(shares)
        self.reshard = reshard
        self.offload = offload
        self.blocks = blocks
        self.checkpoint = checkpoint

    def conflicts(self, config: RunSettings) -> Iterable[tuple[str, str, str]]:
        """Yield `compile=true`, fp16, and `offload` on a CPU."""
        strategy = "strategy=fsdp"
        if config.compile:
            yield "compile=true", strategy, "a compiled network can't wait for its weights; use strategy=ddp"
        if config.precision.startswith("16-"):
            yield strategy, f"precision={config.precision}", "the devices do not share a loss scale; use bf16-mixed"
        if self.offload and config.layout.accelerator == "cpu":
            yield "strategy.offload=true", "accelerator=cpu", "the weights are in the host's memory; leave it out"

    def notes(self, resumes: bool) -> Iterable[str]:
        """Yield what is not known of `offload`."""
        if self.offload:
            yield "strategy.offload=true: no test has run it on a GPU: compare the first steps with another run"

    def build(self, layout: Layout) -> "GradientSum":
        """Return the sum of a step's gradients, of which each of several processes has a part."""
        if layout.num_devices == 1:
            return super().build(layout)
        from lockstep.step.gradients import gradient_sum
        from lockstep.strategies.fsdp.strategy import FullySharded
        from lockstep.strategies.fsdp.sums import ShardedExactGradientSum, ShardedGradientSum

        in_parts = self.checkpoint == "sharded"
        strategy = FullySharded(layout, self.schedule, self.reshard, self.offload, self.blocks, in_parts)
        return gradient_sum(strategy, layout, ShardedGradientSum, ShardedExactGradientSum)
