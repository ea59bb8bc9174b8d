"""The strategies of conf/strategy/: how a step's pieces are computed. Each makes a Lightning strategy.

This module imports quickly, because a config is checked with it before torch is imported.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, Protocol

from lockstep.arithmetic.layout import Layout
from lockstep.errors import UserError
from lockstep.text import plural

if TYPE_CHECKING:
    from lockstep.step.gradients import GradientSum


class RunSettings(Protocol):
    """Those settings of a run with which a strategy may conflict. `Config` has them."""

    @property
    def layout(self) -> Layout:
        """Which device computes which piece of a step."""

    @property
    def precision(self) -> str:
        """Lightning's name of the precision, never `auto`."""

    @property
    def compile(self) -> bool:
        """Whether torch.compile compiles the network."""

    @property
    def elastic(self) -> bool:
        """Whether the run may continue with fewer workers."""


class Strategy:
    """The base class of the strategies in conf/strategy/, which name them by `_target_`.

    Args:
        shares: relative number of pieces of each device, in rank order; None: equal shares.

    Attributes:
        name: the layout's `strategy` name, which `layout_name` may override.
        shares: the argument; empty: equal shares.
        compression: compression of the gradients that are sent.
        weights: what a process has of the weights on several devices; see `Layout`.
        checkpoint: `whole`, or `sharded` if a checkpoint has a folder of the processes' parts beside its file.

    Raises:
        ValueError: a share is not above 0, or not finite.
    """

    name: str
    compression: str = "none"
    weights: str = "whole"
    checkpoint: str = "whole"

    def __init__(self, shares: tuple[float, ...] | None = None) -> None:
        self.shares = tuple(map(float, shares or ()))
        if any(share <= 0 for share in self.shares) or not math.isfinite(sum(self.shares)):
            raise ValueError(f"shares={list(self.shares)}: must be finite numbers above 0")

    def layout_name(self, devices: int) -> str:
        """Return the layout's `strategy` name on `devices` devices over all nodes."""
        return self.name

    def conflicts(self, config: RunSettings) -> Iterable[tuple[str, str, str]]:
        """Yield settings that can't be combined: two settings as a user types them, and the reason.

        Args:
            config: the checked config.
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

    def build(self, layout: Layout) -> "GradientSum":
        """Return the sum of a step's gradients on a layout, with the Lightning strategy that computes its pieces.

        Import torch here: a config is checked without it.
        """
        from lockstep.step.gradients import gradient_sum
        from lockstep.step.strategy import SingleDevice, torch_devices

        return gradient_sum(SingleDevice(device=torch_devices(layout)[0]), layout)


class DDP(Strategy):
    """A process per device.

    Args:
        shares: relative number of pieces of each device, in rank order; None: equal shares.
        sync_batchnorm: compute BatchNorm over the pieces that run at the same time (GPU only).
        compression: compression of the gradients that are sent: `none`, `bf16`, `fp16` or `powersgd`.
    """

    name = "ddp"

    def __init__(
        self,
        shares: tuple[float, ...] | None = None,
        sync_batchnorm: bool = False,
        compression: Literal["none", "bf16", "fp16", "powersgd"] = "none",
    ) -> None:
        super().__init__(shares)
        self.sync_batchnorm = sync_batchnorm
        self.compression = compression

    def conflicts(self, config: RunSettings) -> Iterable[tuple[str, str, str]]:
        """Yield settings that `sync_batchnorm` or `compression` can't be combined with, and the reasons."""
        layout = config.layout
        if self.sync_batchnorm:
            sync = "strategy.sync_batchnorm=true"
            if layout.accelerator == "cpu" or layout.strategy != "ddp":
                other = "accelerator=cpu" if layout.accelerator == "cpu" else f"strategy={layout.strategy}"
                yield sync, other, "torch supports it with ddp on GPUs only; use a net without BatchNorm"
            if layout.exact:
                yield sync, "exact=true", "the result of a piece would depend on other pieces"
            if self.shares:
                yield sync, "strategy.shares", "all devices must compute the same number of pieces"
            if layout.pieces % layout.num_devices:
                yield sync, f"pieces={layout.pieces}", f"pieces must be a multiple of the {layout.num_devices} devices"
            if config.compile:
                yield sync, "compile=true", "a compiled network can't wait for other ranks"
            if config.elastic:
                yield sync, "elastic=true", "fewer devices could not share the pieces evenly; use max_restarts=1"
        if self.compression != "none":
            sent = f"strategy.compression={self.compression}"
            if layout.strategy != "ddp":
                yield sent, f"strategy={layout.strategy}", "only ddp sends gradients"
            if layout.exact:
                yield sent, "exact=true", "compression rounds gradients"
            if config.precision.startswith("64"):
                yield sent, f"precision={config.precision}", "torch compresses float32 gradients only"

    def check_samples(self, layout: Layout, samples: int) -> None:
        """Check that every piece of an epoch's last step has a sample, which `sync_batchnorm` needs.

        Raises:
            UserError: a piece has none.
        """
        if self.sync_batchnorm and 0 < (tail := samples % layout.batch_size) < layout.pieces:
            wrong = f"an epoch's last step has {plural(tail, 'sample')} for {layout.pieces} pieces"
            raise UserError(f"strategy.sync_batchnorm=true: {wrong}: use another batch_size, or fewer pieces")

    def notes(self, resumes: bool) -> Iterable[str]:
        """Yield a warning if PowerSGD's state is lost in a resume."""
        if resumes and self.compression == "powersgd":
            yield (
                "strategy.compression=powersgd starts again: checkpoints do not have its state, so the weights will "
                "differ from those of an uninterrupted run"
            )

    def build(self, layout: Layout) -> "GradientSum":
        """Return the sum of a step's gradients, over a process for each device."""
        from lockstep.step.gradients import gradient_sum
        from lockstep.strategies.ddp import ProcessPerDevice

        return gradient_sum(ProcessPerDevice(self.compression, self.sync_batchnorm), layout)


class Auto(DDP):
    """One device without a wrapper; several devices as with `DDP`."""

    def layout_name(self, devices: int) -> str:
        """Return `single` for one device, else `ddp`."""
        return "ddp" if devices > 1 else "single"

    def build(self, layout: Layout) -> "GradientSum":
        """Return the sum of a step's gradients, as `DDP` does on several devices."""
        return super().build(layout) if layout.strategy == "ddp" else Strategy.build(self, layout)


class DP(Strategy):
    """One process that assigns the pieces to several devices.

    Args:
        shares: relative number of pieces of each device; None: equal shares.
    """

    name = "dp"

    def conflicts(self, config: RunSettings) -> Iterable[tuple[str, str, str]]:
        """Yield `compile=true`."""
        if config.compile:
            yield "compile=true", "strategy=dp", "dp runs the network with copies of its weights; use strategy=ddp"

    def build(self, layout: Layout) -> "GradientSum":
        """Return the sum of a step's gradients, in one process with several devices."""
        from lockstep.step.gradients import gradient_sum
        from lockstep.step.strategy import torch_devices
        from lockstep.strategies.dp import SeveralDevices

        return gradient_sum(SeveralDevices(torch_devices(layout)), layout)


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

    def layout_name(self, devices: int) -> str:
        """Return `single` for one device, which has nothing to share."""
        return self.name if devices > 1 else "single"

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
        if layout.strategy != self.name:
            return super().build(layout)
        from lockstep.step.gradients import gradient_sum
        from lockstep.strategies.fsdp import FullySharded
        from lockstep.strategies.sharded_sums import ShardedExactGradientSum, ShardedGradientSum

        strategy = FullySharded(self.reshard, self.offload, self.blocks, self.checkpoint == "sharded")
        return gradient_sum(strategy, layout, ShardedGradientSum, ShardedExactGradientSum)
