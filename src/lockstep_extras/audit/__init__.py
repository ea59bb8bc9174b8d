"""`extras=[audit]`: in a share of the steps, compute one piece again on another device and compare the bits.

If the bits differ, the step is not applied, and the run ends with an error that names the device at fault.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.config.extras import Extra, RunParts

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from lockstep.config.check import Config
    from lockstep.step.gradients import GradientSum
    from lockstep.step.passes import StepPasses


class Audit(Extra):
    """Computes some pieces again and compares the bits.

    Args:
        share: share of the steps, above 0 and at most 1.
    """

    changes_weights = False

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share:g}: must be above 0 and at most 1")
        self.share = share
        self._auditor: Any = None

    @property
    def setting(self) -> str:
        return f"extras.audit.share={self.share:g}"

    def conflicts(self, config: "Config") -> Iterable[tuple[str, str]]:
        if not config.layout.exact:
            yield "exact=false", "the bits of two devices would differ; exact=true"
        if config.layout.weights == "staged":
            yield (
                f"strategy={config.layout.strategy}",
                "every piece passes all devices, so no other device can check it; strategy=ddp",
            )

        if config.layout.weights == "sharded":
            yield f"strategy={config.layout.strategy}", "no device has the whole gradient of a piece; strategy=ddp"

    def notes(self, config: "Config", resumes: bool) -> Iterable[str]:
        if config.layout.num_devices == 1:
            yield "audit: the only device checks itself, so a permanent fault is not detected"

    def wrap_gradients(self, gradients: "GradientSum") -> "GradientSum":
        from lockstep.arithmetic.exact_sum import CheckedSum

        if gradients.replicas > 1:
            gradients.exact_sum = CheckedSum
        return gradients

    def callbacks(self, parts: RunParts) -> Sequence["Callback"]:
        from lockstep_extras.audit.auditor import Auditor, LogAuditCount

        self._auditor = Auditor(self.share, parts.config.seed, parts.config.layout, parts.folder)
        return [LogAuditCount(self._auditor)]

    def wrap_passes(self, passes: "StepPasses") -> "StepPasses":
        from lockstep.step.strategy import proxy
        from lockstep_extras.audit.auditor import AuditedPasses

        audited: AuditedPasses = proxy(passes, AuditedPasses)
        audited.audit = self._auditor
        return audited

    def metrics(self) -> Mapping[str, float]:
        return {"audit/pieces": self._auditor.checked_pieces}
