"""Lightning's Trainer, adapted so that one training batch is one optimizer step, which consists of pieces.

The loader yields a `StepBatch`: this process's part of one optimizer step. So everything that Lightning counts in
batches (validation, logging, limits, checkpoints) counts optimizer steps. docs/decisions.md gives the
reasons.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import RunningStage

from lockstep.lightning.epochs import StepFitLoop
from lockstep.lightning.evaluations import watched_loop
from lockstep.lightning.hooks import HookFinder, NoProfiler
from lockstep.lightning.logs import StepLogs
from lockstep.lightning.precision import with_quick_hooks
from lockstep.lightning.results import EvaluationLogs, TrainingLogs
from lockstep.lightning.saves import WaitingSaves
from lockstep.lightning.steps import StepLoop
from lockstep.step.gradients import GradientSum
from lockstep.step.hook import StepHook
from lockstep.step.strategy import proxy


class QuickStage:
    """For a trainer: compares its stage by identity.

    See it: `RunningStage.TRAINING == RunningStage.TRAINING` takes 1 us, and a step asks 15 times.
    """

    state: Any

    @property
    def training(self) -> bool:
        """Whether the trainer trains now."""
        return self.state.stage is RunningStage.TRAINING

    @training.setter
    def training(self, value: bool) -> None:
        if value:
            self.state.stage = RunningStage.TRAINING
        elif self.training:
            self.state.stage = None


class StepTrainer(QuickStage, pl.Trainer):
    """Lightning's Trainer, whose training batches are optimizer steps.

    Args:
        gradients: the gradient sum. Its strategy becomes the Trainer's.
        hooks: the hooks of each step.
        seed: the run's seed.
        options: options of Lightning's Trainer.

    Attributes:
        saves: the checkpoints that wait for the end of a step.
        evaluated_loader: the `dataloader_idx` of the evaluation batch that runs now or has run last; None: there is one
            loader, or its batches have ended.
        evaluated_batch: the number of this batch in its loader.
        validates_last_step: whether a validation follows the last step of a run, wherever it is in its epoch.
    """

    evaluated_loader: int | None = None
    evaluated_batch = 0
    validates_last_step = True
    profiler: Profiler

    def __init__(self, gradients: GradientSum, hooks: Sequence[StepHook], seed: int, **options: Any) -> None:
        self._is_quiet = False  # see `without_logging`
        self.saves = WaitingSaves(self, self._save_now)
        strategy: Any = gradients.strategy  # a Lightning strategy, too; see `StepStrategy`
        super().__init__(strategy=strategy, use_distributed_sampler=False, **options)
        strategy.precision_plugin = with_quick_hooks(strategy.precision_plugin)
        if type(self.profiler) is PassThroughProfiler:  # the default
            self.profiler = NoProfiler()
        self._signal_connector = NoSignals(self)
        self._logger_connector = StepLogs(self)
        default_loop = self.fit_loop  # Lightning's own; only its limits are used
        self.fit_loop = StepFitLoop(self, default_loop.min_epochs, default_loop.max_epochs)
        limits = default_loop.min_steps, default_loop.max_steps
        self.fit_loop.epoch_loop = StepLoop(self, gradients, hooks, seed, *limits)
        self.limits: dict[str, Any] = {}  # while loaders are made: the user's limits of batches, by name
        self.fit_loop.epoch_loop._results = TrainingLogs()
        for name in ("validate_loop", "test_loop", "predict_loop"):
            setattr(self, name, watched_loop(getattr(self, name)))
        evaluations = self.fit_loop.epoch_loop.val_loop, self.validate_loop, self.test_loop
        for loop in evaluations:
            loop._results = EvaluationLogs()
        for each in (self.fit_loop, *evaluations, self.predict_loop):
            each._data_source = StepLoaderSource(None, each._data_source.name)
        self.hook_finder = HookFinder(self)
        self._validated: Any = None  # the module that is known to have something to validate

    @property
    def enable_validation(self) -> bool:
        """Whether the run validates. A step asks, so the methods of a module are inspected once."""
        if not self.limit_val_batches:
            return False
        if self._validated is not self.lightning_module and super().enable_validation:
            self._validated = self.lightning_module
        return self._validated is self.lightning_module

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The progress bar, by which a module's `self.print` prints."""
        bar = super().progress_bar_callback
        return proxy(bar or ProgressBar(), PrintsNothing) if self._is_quiet else bar

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint; see Lightning's method. Inside a step it is saved when the step is complete."""
        if not self.saves.add(*args, **kwargs):
            self._save_now(*args, **kwargs)

    def _save_now(self, *args: Any, **kwargs: Any) -> None:
        with self.strategy.saving():  # type: ignore[attr-defined]
            super().save_checkpoint(*args, **kwargs)
        self.saves.made = True

    def checkpoint_content(self) -> dict[str, Any]:
        """Return what a checkpoint has, which Lightning gives to a file only. All ranks must call it."""
        with self.strategy.saving():  # type: ignore[attr-defined]
            content: dict[str, Any] = self._checkpoint_connector.dump_checkpoint(weights_only=False)
        return content

    @contextmanager
    def without_logging(self) -> Iterator[None]:
        """Return a context in which what training logs or prints by its module, and its profile, leave no trace."""
        loop, connector = self.fit_loop.epoch_loop, self._logger_connector
        results, loggers, current, profiler = loop._results, self.loggers, connector._current_fx, self.profiler
        loop._results, self.loggers = TrainingLogs(), [DummyLogger() for _ in loggers]
        self.profiler = NoProfiler()  # torch's counts each call of `training_step` as a step
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False
            loop._results, self.loggers, connector._current_fx = results, loggers, current
            self.profiler = profiler


class PrintsNothing:
    """Methods for `proxy`: a progress bar has them in place of its own."""

    is_enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print nothing."""


class StepLoaderSource(_DataLoaderSource):
    """Gives a loop our loaders, and leaves the methods of a data module to users, who get their own loaders.

    See it: `self.trainer.datamodule.train_dataloader()` in a hook.
    """

    def dataloader(self) -> Any:
        """Return the loader of a loop."""
        loader_of_loop = getattr(self.instance, "loader_of_loop", None)
        return super().dataloader() if loader_of_loop is None else loader_of_loop(self.name)


class NoSignals(_SignalConnector):
    """Registers no signal handlers.

    See it: SIGTERM to one rank of a ddp run while the others are in a collective; all hang.
    """

    def register_signal_handlers(self) -> None:
        """Register none. Lightning's SIGTERM handler broadcasts, and hangs if other ranks are in another collective.

        Lockstep's handler only sets a flag.
        """
