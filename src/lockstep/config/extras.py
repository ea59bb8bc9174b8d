"""The seam for extras: what a feature outside of the core may take part in.

An extra is named by `_target_` in conf/extras/, and built once for a run, from its options, while the config is checked
(so its module must import quickly: torch and Lightning belong into its methods). `extras=[<name>,<name>]` chooses.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule

    from lockstep.arithmetic.deal import Deal
    from lockstep.config.check import Config
    from lockstep.step.gradients import GradientSum
    from lockstep.step.hooks import StepHook


@dataclass(frozen=True)
class RunParts:
    """What a worker's run is made of, for extras.

    Attributes:
        config: the checked config.
        splits: the opened data (`lockstep.data.Splits`).
        folder: the run's.
        module: with the weights that a new run begins with; a resumed run's are loaded later, from `resumed`.
        resumed: the checkpoint that the run continues from; empty: none.
        rank: of this worker.
    """

    config: "Config"
    splits: Any
    folder: Path
    module: "LightningModule"
    resumed: Mapping[str, Any]
    rank: int


class CheckpointObserver(Protocol):
    """Sees each checkpoint on rank zero, in the thread that writes it."""

    def before_write(self, checkpoint: dict[str, Any]) -> None:
        """Before it is written: may add to it."""

    def after_write(self) -> None:
        """When it is on the disk."""


class Extra:
    """A feature that the core does not know by name. Every method does nothing here: override what you need."""

    own_weights = False  # whether each process steps by a gradient of its own, to weights of its own
    changes_weights = True  # whether a run has other weights with it
    can_skip = True  # whether a step may be left out (nonfinite=skip)
    name = ""  # of its file in conf/extras/, set when it is chosen

    @property
    def setting(self) -> str:
        """What a user types for it, for messages: `extras.<name>.<option>=<value>` where an option matters."""
        return f"extras=[{self.name}]"

    def conflicts(self, config: "Config") -> Iterable[tuple[str, str]]:
        """Yield what the extra can't be combined with: the other setting as it is typed, and why."""
        return ()

    def describe(self) -> str:
        """Return what a run's first lines say of it; may be empty."""
        return ""

    def notes(self, config: "Config", resumes: bool) -> Iterable[str]:
        """Yield lines for the log at a run's start; `resumes`: whether the run continues from a checkpoint."""
        return ()

    def wrap_deal(self, deal: "Deal") -> "Deal":
        """Return what deals the pieces of each step to the devices instead. Called first, in each worker."""
        return deal

    def wrap_gradients(self, gradients: "GradientSum") -> "GradientSum":
        """Return the gradient sum to use instead. Called before `step_hooks` and `callbacks`."""
        return gradients

    def step_hooks(self, parts: RunParts) -> "Sequence[StepHook]":
        """Return what takes part in each step."""
        return ()

    def callbacks(self, parts: RunParts) -> "Sequence[Callback]":
        """Return callbacks of Lightning's Trainer, which are called before those of the core and of conf/."""
        return ()

    def checkpoint_observers(self, parts: RunParts) -> Sequence[CheckpointObserver]:
        """Return what sees each checkpoint that rank zero writes."""
        return ()

    def metrics(self) -> Mapping[str, float]:
        """Return numbers for the run's summary, at its end."""
        return {}
