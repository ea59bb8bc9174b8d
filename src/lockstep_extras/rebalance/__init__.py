"""`extras=[rebalance]`: move pieces from slow devices to fast ones during the run. The step stays the same."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.config.extras import Extra, RunParts
from lockstep.launch.environment import external_workers

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from lockstep.config.check import Config
    from lockstep.step.passes import StepPasses


class Rebalance(Extra):
    """Assigns pieces to devices by the time that a piece takes on each.

    Args:
        every: optimizer steps between comparisons of these times.
    """

    changes_weights = False

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"every={every}: must be 1 or more")
        self.every = every
        self._rebalancer: Any = None

    def conflicts(self, config: "Config") -> Iterable[tuple[str, str]]:
        layout = config.layout
        # Each is a setting and the reason, some with "; " and a setting to use instead.
        if layout.weights == "staged":
            yield f"strategy={layout.strategy}", "every piece passes all devices, so none can move; strategy=ddp"
        if config.layout.weights == "sharded":
            yield f"strategy={layout.strategy}", "the devices wait for each other in each pass; strategy=ddp"
        if layout.num_devices > 1 and layout.one_process:
            yield (
                f"strategy={layout.strategy}",
                "one process runs all devices, so no device has a time of its own; strategy=ddp",
            )
        if getattr(config.strategy, "sync_batchnorm", False):
            yield "strategy.sync_batchnorm=true", "all devices must have equally many pieces"
        for extra in config.extras.values():
            if getattr(extra, "separate_weights", False):
                yield extra.setting, "the result depends on which device computes which piece"
        # An engine may start another number of workers the next time, so `notes` only warns.
        if layout.num_devices == layout.pieces > 1 and not external_workers():
            why = f"each of {layout.num_devices} devices has one piece, so none can move"
            yield f"pieces={layout.pieces}", f"{why}; pieces={8 * layout.num_devices}"

    def notes(self, config: "Config", resumes: bool) -> Iterable[str]:
        if config.layout.replicas == 1:
            yield "rebalance: there is one device, so no piece can move"
        elif config.layout.pieces == config.layout.num_devices:
            yield "rebalance: each device has one piece, so none can move"
        elif not config.layout.exact:
            yield "rebalance: the order of sums depends on times, so two runs differ by rounding; exact=true: same bits"

    def callbacks(self, parts: RunParts) -> "Sequence[Callback]":
        if parts.config.layout.replicas == 1:
            return []
        from lockstep_extras.rebalance.assignment import MovingAssignment
        from lockstep_extras.rebalance.rebalancer import Rebalancer

        self._rebalancer = Rebalancer(self.every, MovingAssignment(parts.config.layout), parts.rank)
        return [self._rebalancer]

    def wrap_passes(self, passes: "StepPasses") -> "StepPasses":
        if self._rebalancer is None:
            return passes
        from lockstep.step.strategy import proxy
        from lockstep_extras.rebalance.rebalancer import TimedPasses

        timed: TimedPasses = proxy(passes, TimedPasses)
        timed.times = self._rebalancer
        return timed

    def metrics(self) -> Mapping[str, float]:
        return {"rebalance/changes": self._rebalancer.changes if self._rebalancer else 0}
