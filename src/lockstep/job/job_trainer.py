"""The trainer of a job: Lightning's methods, with what belongs to every run around them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.profilers import PassThroughProfiler

from lockstep.launch.process_group import broadcast_from_rank_zero
from lockstep.step.loop import StepTrainer


class FitHooks(Protocol):
    """What a job does before and after the methods of its trainer; described in `lockstep.job.job.Job`."""

    def skips_fit(self) -> bool: ...

    def around_fit(self, ckpt_path: Any) -> AbstractContextManager[str | None]: ...

    def around_test(self, ckpt_path: Any) -> AbstractContextManager[None]: ...


class JobTrainer(StepTrainer):
    """A StepTrainer that `Job.make_trainer` returns.

    Attributes:
        job: the job; None where the trainer is used without one.
    """

    callbacks: list[pl.Callback]
    job: FitHooks | None = None

    def fit(  # type: ignore[override]
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        **options: Any,
    ) -> None:
        """Fit the module; see Lightning's Trainer."""
        if self.job is None or not self.job.skips_fit():
            with self.job.around_fit(ckpt_path) if self.job else nullcontext(ckpt_path) as path:
                super().fit(model, train_dataloaders, val_dataloaders, datamodule, path, **options)

    def test(  # type: ignore[override]
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = False,
        datamodule: Any = None,
        **options: Any,
    ) -> Any:
        """Test the module; see Lightning's Trainer.

        `ckpt_path="best"` are the weights of the best checkpoint, or those that training has ended with if the run has
        none.
        """
        if ckpt_path == "best":
            paths = [str(path) for callback in self.callbacks if (path := getattr(callback, "best_path", None))]
            ckpt_path = broadcast_from_rank_zero(paths[0] if paths else None)  # other ranks may not see the file
        with self._without_fit_only(), self.job.around_test(ckpt_path) if self.job else nullcontext():
            return super().test(model, dataloaders, ckpt_path, verbose, datamodule, **options)

    @contextmanager
    def _without_fit_only(self) -> Iterator[None]:
        """Leave out for a while what can't work in a test."""
        before = self.callbacks, self.profiler
        self.profiler = PassThroughProfiler()  # Lightning's profilers fail if their schedule recorded nothing
        # WeightAveraging would load from the checkpoint the weights that are not averaged.
        self.callbacks = [each for each in self.callbacks if not isinstance(each, WeightAveraging)]
        try:
            yield
        finally:
            self.callbacks, self.profiler = before
