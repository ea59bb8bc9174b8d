"""The interface for extras: features outside of the core that take part in a run.

An extra is named by `_target_` in conf/extras/, and chosen by `extras=[<name>,<name>]`. It is created once for a run,
from its options, while the config is checked. Its module must therefore import quickly: import torch and Lightning
inside its methods.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule

    from lockstep.config.check import Config
    from lockstep.step.gradients import GradientSum
    from lockstep.step.passes import StepPasses


@dataclass(frozen=True)
class RunParts:
    """The parts of a worker's run, for extras.

    Attributes:
        config: the checked config.
        splits: the open data set (`lockstep.data.Splits`).
        folder: the run's folder.
        module: the module with its initial weights. A resumed run loads its weights from `resumed` later.
        resumed: the content of the checkpoint from which the run continues; empty for a new run.
        rank: the worker's rank.
    """

    config: "Config"
    splits: Any
    folder: Path
    module: "LightningModule"
    resumed: dict[str, Any]
    rank: int


class CheckpointObserver(Protocol):
    """Takes part in the writing of each checkpoint, on rank zero, in the thread that writes it."""

    def before_write(self, checkpoint: dict[str, Any]) -> None:
        """Change a checkpoint before it is written.

        Args:
            checkpoint: the content; entries may be added.
        """

    def after_write(self) -> None:
        """React to a checkpoint that is complete on the disk."""


class Extra:
    """A feature outside of the core. The methods do nothing here: override those that you need.

    Attributes:
        changes_weights: whether the extra changes the weights of a run.
        name: the name of the extra's file in conf/extras/; set when the extra is chosen.
    """

    changes_weights = True
    name = ""

    @property
    def setting(self) -> str:
        """The setting that chooses the extra, as a user types it. Override it to name an option."""
        return f"extras=[{self.name}]"

    def conflicts(self, config: "Config") -> Iterable[tuple[str, str]]:
        """Yield settings that can't be combined with this extra.

        Args:
            config: the checked config.

        Returns:
            Pairs of the other setting, as a user types it (empty if it is not chosen), and the reason. A reason may end
            with a remedy, after a semicolon: `the bits of two devices would differ; exact=true`.
        """
        return ()

    def notes(self, config: "Config", resumes: bool) -> Iterable[str]:
        """Yield lines for the log at the start of a run.

        Args:
            config: the checked config.
            resumes: whether the run continues from a checkpoint.
        """
        return ()

    def wrap_gradients(self, gradients: "GradientSum") -> "GradientSum":
        """Return the gradient sum to use. It is called before the methods that get the parts of the run.

        Args:
            gradients: the gradient sum of the core, or of an earlier extra.
        """
        return gradients

    def wrap_passes(self, passes: "StepPasses") -> "StepPasses":
        """Return what computes each step. It is called last, when the Trainer is made.

        Args:
            passes: that of the core, or of an earlier extra; `lockstep.step.strategy.proxy` gives it other methods.
        """
        return passes

    def callbacks(self, parts: RunParts) -> "Sequence[Callback]":
        """Return callbacks for Lightning's Trainer.

        The callbacks are called before those of the core and of conf/.

        Args:
            parts: the parts of the worker's run.
        """
        return ()

    def checkpoint_observers(self, parts: RunParts) -> Sequence[CheckpointObserver]:
        """Return the objects that take part in the writing of each checkpoint.

        Args:
            parts: the parts of the worker's run.
        """
        return ()

    def metrics(self) -> Mapping[str, float]:
        """Return numbers for the run's summary, at the end of the run, by name."""
        return {}
