"""`extras=[audit]`: of a share of steps one piece is computed again, by another device, and must come to the same bits.
Else the step is not applied, and the run ends with the name of the device that computed wrong."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.config.extras import Extra, RunParts

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from lockstep.config.check import Config
    from lockstep.step.gradients import GradientSum
    from lockstep.step.hooks import StepHook


class Audit(Extra):
    """Compute some pieces again and compare the bits.

    Args:
        share: of the steps, above 0 and at most 1.
    """

    changes_weights = False

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share:g}: must be above 0 and at most 1")
        self.share = share
        self._hook: Any = None

    @property
    def setting(self) -> str:
        return f"extras.audit.share={self.share:g}"

    def conflicts(self, config: "Config") -> Iterable[tuple[str, str]]:
        if not config.layout.exact:
            yield "exact=false", "no two devices would have the same bits; exact=true"
        if config.layout.staged:
            yield (
                f"strategy={config.layout.strategy}",
                "every piece passes all devices, none is another one; strategy=ddp",
            )

    def notes(self, config: "Config", resumes: bool) -> Iterable[str]:
        if config.layout.num_devices == 1:
            yield "audit: the only device computes its own pieces again: a fault that lasts is not seen"

    def wrap_gradients(self, gradients: "GradientSum") -> "GradientSum":
        gradients.options.check_messages = gradients.world_size > 1
        return gradients

    def step_hooks(self, parts: RunParts) -> Sequence["StepHook"]:
        from lockstep.extras.audit.hook import AuditHook

        self._hook = AuditHook(self.share, parts.config.seed, parts.config.layout)
        return [self._hook]

    def callbacks(self, parts: RunParts) -> Sequence["Callback"]:
        from lockstep.extras.audit.hook import LogAuditCount

        return [LogAuditCount(self._hook)]

    def metrics(self) -> Mapping[str, float]:
        return {"audit/pieces": self._hook.pieces}
