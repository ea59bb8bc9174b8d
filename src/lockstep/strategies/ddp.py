"""`strategy=ddp`, and `strategy=auto`."""

from collections.abc import Iterable
from typing import Literal

from lockstep.arithmetic.layout import Layout
from lockstep.errors import UserError
from lockstep.strategies.strategy import RunSettings, Strategy
from lockstep.text import plural


class DDP(Strategy):
    """A process per device; one device alone.

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
