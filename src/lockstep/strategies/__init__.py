"""Who computes a step's pieces: the choices of conf/strategy/, and Lightning's strategies that they make.

This module imports quickly: a config is checked with it before torch is there.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from lockstep.arithmetic.layout import Layout
from lockstep.errors import UserError
from lockstep.text import plural

if TYPE_CHECKING:
    from lockstep.strategies.base import PieceStrategy


class Strategy:
    """A choice of conf/strategy/, named there by `_target_`, with its own options.

    Attributes:
        shares: relative number of pieces of each device, in rank order; empty: even.
        compression: of gradients that are sent.
        staged: whether each device holds a part of the network, through which all pieces pass.
    """

    compression: str = "none"
    staged = False

    def __init__(self, shares: tuple[float, ...] | None = None) -> None:
        self.shares = tuple(map(float, shares or ()))
        if any(share <= 0 for share in self.shares):
            raise ValueError(f"shares={list(self.shares)}: must be above 0")

    def name_on(self, devices: int) -> str:
        """Return the layout's name on so many devices in all."""
        raise NotImplementedError

    def conflicts(self, config: Any) -> Iterable[tuple[str, str, str]]:
        """Yield what can't be combined: two settings as they are typed, and why."""
        return ()

    def check_samples(self, layout: Layout, samples: int) -> None:
        """Refuse a training set of so many samples that its steps don't fit."""

    def notes(self, resumes: bool) -> Iterable[str]:
        """Yield lines for the log at a run's start; `resumes`: whether the run continues from a checkpoint."""
        return ()

    def make(self, layout: Layout) -> "PieceStrategy":
        """Return Lightning's strategy for a layout."""
        raise NotImplementedError


class DDP(Strategy):
    """A process per device.

    Args:
        shares: relative number of pieces of each device, in rank order.
        sync_batchnorm: BatchNorm over the pieces that run at once (CUDA).
        compression: gradients on the wire: `none`, `bf16`, `fp16` or `powersgd`.
    """

    def __init__(
        self,
        shares: tuple[float, ...] | None = None,
        sync_batchnorm: bool = False,
        compression: Literal["none", "bf16", "fp16", "powersgd"] = "none",
    ) -> None:
        super().__init__(shares)
        self.sync_batchnorm = sync_batchnorm
        self.compression = compression

    def name_on(self, devices: int) -> str:
        return "ddp"

    def conflicts(self, config: Any) -> Iterable[tuple[str, str, str]]:
        layout = config.layout
        if self.sync_batchnorm:
            sync = "strategy.sync_batchnorm=true"
            if layout.accelerator == "cpu" or layout.strategy != "ddp":
                other = "accelerator=cpu" if layout.accelerator == "cpu" else f"strategy={layout.strategy}"
                yield sync, other, "torch has it for ddp on GPUs only; model.norm=group needs no syncing"
            if layout.exact:
                yield sync, "exact=true", "pieces would depend on each other"
            if self.shares:
                yield sync, "strategy.shares", "devices must compute as many pieces each"
            if layout.pieces % layout.num_devices:
                yield sync, f"pieces={layout.pieces}", f"the {layout.num_devices} devices must divide them"
            if config.compile:
                yield sync, "compile=true", "ranks wait for each other inside a network"
            if config.elastic:
                yield sync, "elastic=true", "fewer devices would not have as many pieces each; max_restarts=1"
        if self.compression != "none":
            sent = f"strategy.compression={self.compression}"
            if layout.strategy != "ddp":
                yield sent, f"strategy={layout.strategy}", "only ddp sends gradients"
            if layout.exact:
                yield sent, "exact=true", "it rounds gradients"
            if config.precision.startswith("64"):
                yield sent, f"precision={config.precision}", "torch compresses float32 gradients only"

    def check_samples(self, layout: Layout, samples: int) -> None:
        if self.sync_batchnorm and 0 < (tail := samples % layout.batch_size) < layout.pieces:
            why = f"an epoch's last step has {plural(tail, 'sample')} for {layout.pieces} pieces, and ranks wait for "
            raise UserError(f"strategy.sync_batchnorm=true: {why}one without; another batch_size, or fewer pieces")

    def notes(self, resumes: bool) -> Iterable[str]:
        if resumes and self.compression == "powersgd":
            yield (
                "strategy.compression=powersgd begins anew: what it has left out so far is in no checkpoint, so the "
                "run does not end with the bits of one that was never interrupted"
            )

    def make(self, layout: Layout) -> "PieceStrategy":
        from lockstep.strategies.ddp import DistributedDataParallel

        return DistributedDataParallel(self.compression, self.sync_batchnorm)


class Auto(DDP):
    """One device without a wrapper; several as `DDP`."""

    def name_on(self, devices: int) -> str:
        return "ddp" if devices > 1 else "single"

    def make(self, layout: Layout) -> "PieceStrategy":
        if layout.strategy == "ddp":
            return super().make(layout)
        from lockstep.strategies.base import SingleDevice, torch_devices

        return SingleDevice(device=torch_devices(layout)[0])


class DP(Strategy):
    """One process that computes the pieces on several devices in turn.

    Args:
        shares: relative number of pieces of each device.
    """

    def name_on(self, devices: int) -> str:
        return "dp"

    def conflicts(self, config: Any) -> Iterable[tuple[str, str, str]]:
        if config.compile:
            yield "compile=true", "strategy=dp", "dp gives a network other devices' weights; strategy=ddp"

    def make(self, layout: Layout) -> "PieceStrategy":
        from lockstep.strategies.base import torch_devices
        from lockstep.strategies.dp import DataParallel

        return DataParallel(torch_devices(layout))
