"""What stands around the methods of a Trainer. This module imports neither torch nor Lightning."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer


class GivenData(NamedTuple):
    """The data that one of a Trainer's methods gets: loaders or data sets, or a data module."""

    loaders: Any = None
    val_loaders: Any = None
    datamodule: Any = None


class Run:
    """What a Trainer does before and after each of its methods, with the data, the checkpoints and the run's folder.

    Here that is nothing. `lockstep.Job` is the run of a config, and `ProgramRun` that of a program that makes its own
    Trainer.

    Attributes:
        prints_results: whether `trainer.test` prints a table of its results where its caller does not choose.
    """

    prints_results = False

    def begin(self, trainer: "Trainer") -> None:
        """Take the Trainer, which has just been made."""

    def skips_fit(self) -> bool:
        """Return whether a call of `trainer.fit` has nothing to do."""
        return False

    @contextmanager
    def around_fit(self, model: Any, given: GivenData, ckpt_path: Any) -> Iterator[tuple[GivenData, str | None]]:
        """Return the context of a `trainer.fit`: its data, and the checkpoint from which it continues."""
        yield given, ckpt_path

    @contextmanager
    def around_evaluation(
        self, stage: str, model: Any, given: GivenData, ckpt_path: Any
    ) -> Iterator[tuple[Any, GivenData, str | None]]:
        """Return the context of a `validate`, `test` or `predict`: the module, its data, and the checkpoint to load."""
        yield model, given, ckpt_path
