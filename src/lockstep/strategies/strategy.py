"""The base class of strategies: how a step's pieces are computed. By itself it is a process per device."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.arithmetic.layout import Action, Layout

if TYPE_CHECKING:
    from lockstep.step.batch import MicroBatch
    from lockstep.step.gradients import GradientSum


@dataclass(frozen=True)
class RunSettings:
    """Those settings of a run with which a strategy may conflict.

    Attributes:
        layout: which device computes which piece of a step.
        precision: Lightning's name of the precision, never `auto`.
        compile: whether torch.compile compiles the network.
        elastic: whether the run may continue with fewer workers.
    """

    layout: Layout
    precision: str
    compile: bool = False
    elastic: bool = False


class Strategy:
    """The base class of the strategies in conf/strategy/, which name them by `_target_`. Override what differs.

    A config makes one before torch is imported, and `build` makes what runs: import torch inside methods only.

    Args:
        shares: relative number of pieces of each device, in rank order; None: equal shares.

    Attributes:
        name: the layout's name of it on several devices. One device needs no strategy: its layout is `single`.
        shares: the argument; empty: equal shares.
        compression: compression of the gradients that are sent; see `DDP`.
        sync_batchnorm: whether BatchNorm is computed over several pieces; see `DDP`.
        weights: what a process has of the weights on several devices; see `Layout`.
        one_process: whether one process uses all devices; see `Layout`.
        checkpoint: `whole`, or `sharded` if a checkpoint has a folder of the processes' parts beside its file.

    Raises:
        ValueError: a share is not above 0, or not finite.
    """

    name: str
    compression: str = "none"
    sync_batchnorm = False
    weights: str = "whole"
    one_process = False
    checkpoint: str = "whole"

    def __init__(self, shares: tuple[float, ...] | None = None) -> None:
        self.shares = tuple(map(float, shares or ()))
        if any(share <= 0 for share in self.shares) or not math.isfinite(sum(self.shares)):
            raise ValueError(f"shares={list(self.shares)}: must be finite numbers above 0")

    def conflicts(self, config: RunSettings) -> Iterable[tuple[str, str, str]]:
        """Yield settings that can't be combined: two settings as a user types them, and the reason.

        Args:
            config: the settings of the run.
        """
        return ()

    def check_samples(self, layout: Layout, samples: int) -> None:
        """Check that the steps of a training set fit this strategy.

        Args:
            layout: the run's layout.
            samples: samples of the training set.

        Raises:
            UserError: they do not fit.
        """

    def notes(self, resumes: bool) -> Iterable[str]:
        """Yield lines for the log at a run's start.

        Args:
            resumes: whether the run continues from a checkpoint.
        """
        return ()

    def schedule(self, micro_batches: "Sequence[MicroBatch]") -> Iterator[tuple[Action, int]]:
        """Yield the passes of a step's micro-batches in order, each with the index of its micro-batch.

        Here the backward pass of each micro-batch follows its forward pass. With another order, gradients are summed
        over the processes after the passes, and not during the last one.

        Args:
            micro_batches: those of this process, in the order of their devices' pieces.
        """
        for index in range(len(micro_batches)):
            yield Action.FORWARD, index
            yield Action.BACKWARD, index

    def build(self, layout: Layout) -> "GradientSum":
        """Return the sum of a step's gradients on a layout, with the Lightning strategy that computes its pieces."""
        from lockstep.lightning.one_process import OneProcess
        from lockstep.lightning.process_per_device import ProcessPerDevice
        from lockstep.step.gradients import gradient_sum

        if not layout.has_process_group:
            return gradient_sum(OneProcess(layout, self.schedule), layout)
        reduces_in_pass = type(self).schedule is Strategy.schedule
        strategy = ProcessPerDevice(layout, self.schedule, reduces_in_pass, self.compression, self.sync_batchnorm)
        return gradient_sum(strategy, layout)
