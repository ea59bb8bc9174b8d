"""What the functions in `src/train.py`, `src/evaluate.py` and `src/predict.py` get: one run, in one of its workers.

This module imports next to nothing, so that a program that names `Job` starts quickly.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import UserError
from lockstep.project import project
from lockstep.trainer.run import GivenData, Run

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lockstep.config.check import Config
    from lockstep.data import Splits, StepData
    from lockstep.trainer.trainer import Trainer


class Job(Run, ABC):
    """One run, in one of its workers: its config and data, and what is built from them.

    Each worker of the layout makes one and passes it to the program's function. Errors, checkpoints, the summary and
    what continues after a kill do not depend on that function.

    Attributes:
        config: the checked config.
        splits: the open data set, with its `train`, `val` and `test`.
        folder: the run's folder.
        checkpoint: the path of the checkpoint from which the run continues, or whose weights are used; None for a new
            run of training.
    """

    name = "train"  # of the program and its function

    def __init__(self, config: "Config", splits: "Splits", folder: Path, checkpoint: str | None) -> None:
        self.config, self.splits, self.folder, self.checkpoint = config, splits, folder, checkpoint
        self._module: pl.LightningModule | None = None
        self._trainer: Trainer | None = None

    @abstractmethod
    def build_module(self) -> "pl.LightningModule":
        """Build the module; see `make_module`."""

    @abstractmethod
    def build_trainer(self, module: "pl.LightningModule") -> "Trainer":
        """Build the trainer; see `make_trainer`."""

    def make_module(self) -> "pl.LightningModule":
        """Return the config's LightningModule.

        In training its weights depend on the seed, or are those of `init_from`. `trainer.fit` replaces them where the
        run continues from a checkpoint.

        Raises:
            UserError: The config does not fit the module.
        """
        if self._module is not None:
            raise UserError(f"{self.name}(job) calls job.make_module() twice: a run has one module")
        self._module = self.build_module()
        return self._module

    def make_data(self) -> "StepData":
        """Return the data of this worker, for the trainer's `datamodule`: the samples of its pieces."""
        from lockstep.job.build import make_data

        return make_data(self.config, self.splits)

    def make_trainer(self, module: "pl.LightningModule") -> "Trainer":
        """Return the `lockstep.Trainer` on the config's layout, with the config's callbacks and loggers.

        Args:
            module: what `make_module` has returned.

        Raises:
            UserError: The config does not fit the module, or `module` is another one.
        """
        if module is not self._module or self._trainer is not None:
            wrong = "gets another module" if self._trainer is None else "is called twice"
            raise UserError(
                f"{self.name}(job): job.make_trainer {wrong}: a run has one trainer, of the module that "
                "job.make_module() returns"
            )
        self._trainer = self.build_trainer(module)
        return self._trainer

    @property
    def has_test(self) -> bool:
        """Whether the data set has a test set, and the module a `test_step`."""
        import lightning.pytorch as pl

        from lockstep.lightning.hooks import overrides_method

        return self.splits.test is not None and overrides_method(self._module, "test_step", pl.LightningModule)

    def call(self, function: "Callable[[Job], Any] | None" = None) -> None:
        """Call a function with this job.

        Args:
            function: None: the program's own.
        """
        (function or project().function(self.name))(self)

    # --- what the trainer calls ---

    def skips_fit(self) -> bool:
        """Count a call of `trainer.fit`. Return whether it has nothing to do, since a resumed run is in a later fit."""
        raise UserError(f"{self.name}(job) calls trainer.fit: only train.py trains")

    @contextmanager
    def around_evaluation(
        self, stage: str, model: Any, given: GivenData, ckpt_path: Any
    ) -> Iterator[tuple[Any, GivenData, str | None]]:
        """Do what belongs to each `trainer.test`; see `around_test`."""
        if stage != "test":
            yield model, given, ckpt_path
            return
        from lockstep.job.build import best_checkpoint, without_fit_only

        path = best_checkpoint(self._trainer) if ckpt_path == "best" else ckpt_path
        with without_fit_only(self._trainer), self.around_test(path):
            yield model, given, path

    @contextmanager
    def around_test(self, ckpt_path: Any) -> Iterator[None]:
        """Do what belongs to each `trainer.test`, before and after it."""
        yield
