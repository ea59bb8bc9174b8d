"""Workarounds for behaviour of Lightning 2.6, each in one place, so that each can be dropped alone.

Every class or method names the behaviour and how to see it. tests/step/test_loop.py and
tests/test_promise_5_evaluation.py fail when the private names used here change.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor
from torchmetrics import Metric

from lockstep.errors import StepRefused, UserError
from lockstep.launch.failures import ENDS, no_silent_end, refused_end
from lockstep.launch.process_group import broadcast_from_rank_zero, gather_objects
from lockstep.step.batch import StepBatch, data_of, evaluated_split
from lockstep.step.evaluation_logs import EvaluationLogs, TrainingLogs, add_missing_metrics
from lockstep.step.logged_values import differs, remedy
from lockstep.step.module_state import SavedTensors
from lockstep.step.passes import overrides_method
from lockstep.step.strategy import Hooks

LOG = logging.getLogger("lockstep")
SECONDS_BETWEEN_LOOKS = 1.0  # of several ranks at rank zero's clock, if a time is the interval between validations


class NoSignals(_SignalConnector):
    """Registers no signal handlers.

    See it: SIGTERM to one rank of a ddp run while the others are in a collective; all hang.
    """

    def register_signal_handlers(self) -> None:
        """Register none. Lightning's SIGTERM handler broadcasts, and hangs if other ranks are in another collective.

        Lockstep's handler only sets a flag.
        """


class NoProfiler(PassThroughProfiler):
    """Measures nothing, without a context manager of its own for each call.

    See it: scripts/lab/benchmark.py overhead; Lightning enters about 60 such contexts in a step of ten callbacks.
    """

    nothing: AbstractContextManager[None] = nullcontext()

    def profile(self, action_name: str) -> Any:
        """Return a context in which nothing is measured."""
        return self.nothing


class HookFinder:
    """Finds the callbacks that have a hook. A step looks at them once, since most have no hook of a step.

    See it: scripts/lab/benchmark.py overhead; looked up at each call, the hooks of 12 callbacks take 20 us of a step.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._state: list[tuple[Any, int]] = []  # the callbacks, each with its number of attributes
        self._by_hook: dict[str, list[Any]] = {}

    def begin_step(self) -> None:
        """Look again if callbacks were added or removed, or have set hooks on themselves, as Lightning allows."""
        state = [(callback, len(vars(callback))) for callback in self._trainer.callbacks]
        if state != self._state:
            self._state, self._by_hook = state, {}

    def callbacks_with(self, name: str) -> list[Any]:
        """Return the callbacks that have a hook, in their order."""
        if name not in self._by_hook:
            nobodys, callbacks = getattr(pl.Callback, name, None), self._trainer.callbacks
            self._by_hook[name] = [c for c in callbacks if getattr(getattr(c, name), "__func__", None) is not nobodys]
        return self._by_hook[name]


def call_hook(trainer: Any, name: str, *args: Any) -> Any:
    """Call a hook of the callbacks that have it, in their order, then of the module. Return the module's result.

    Without a profiler, this does what Lightning's `_call_callback_hooks` and `_call_lightning_module_hook` do, which
    make a name for the profiler for each callback, and set the hook's name through `nn.Module.__setattr__`.

    See it: scripts/lab/benchmark.py overhead; with Lightning's functions a step takes 200 us more.
    """
    if not isinstance(trainer.profiler, PassThroughProfiler):
        call._call_callback_hooks(trainer, name, *args)
        return call._call_lightning_module_hook(trainer, name, *args)
    module = trainer.lightning_module

    def call_all() -> Any:
        for callback in trainer.hook_finder.callbacks_with(name):
            hook = getattr(callback, name)
            if callable(hook):
                hook(trainer, module, *args)
        hook = getattr(module, name)
        return hook(*args) if callable(hook) else None

    return _call_as(module, name, call_all)


def call_of_module(trainer: Any, name: str, *args: Any) -> Any:
    """Call a method of the module as a hook; see `call_hook`."""
    if not isinstance(trainer.profiler, PassThroughProfiler):
        return call._call_lightning_module_hook(trainer, name, *args)
    module = trainer.lightning_module
    return _call_as(module, name, getattr(module, name), *args)


def call_of_strategy(trainer: Any, name: str, *args: Any) -> Any:
    """Call a method of the strategy as a hook; see `call_hook`."""
    if not isinstance(trainer.profiler, PassThroughProfiler):
        return call._call_strategy_hook(trainer, name, *args)
    strategy = trainer.strategy
    return _call_as(strategy.lightning_module, name, getattr(strategy, name), *args)


def _call_as(module: Any, hook: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function while `hook` is the running hook, which `self.log` reads."""
    attributes = vars(module)  # `nn.Module.__setattr__` would take 5 us
    before = attributes["_current_fx_name"]
    attributes["_current_fx_name"] = hook
    result = function(*args)
    attributes["_current_fx_name"] = before
    return result


class StepPrecision(Precision):
    """Calls the hooks around the backward passes and before the optimizer step by `call_hook`."""

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Call `on_before_backward`."""
        call_hook(module.trainer, "on_before_backward", tensor)
        return tensor

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Return the loss without its graph. `on_after_backward` follows once, with the gradient of the step."""
        return tensor.detach()

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """Call `on_after_backward` and `on_before_optimizer_step`.

        Clip the gradient if there is a limit, or if the module clips by itself.
        """
        trainer = model.trainer
        call_hook(trainer, "on_after_backward")
        call_hook(trainer, "on_before_optimizer_step", optimizer)
        trainer.strategy.take_assigned_gradients()
        methods = ("configure_gradient_clipping", "clip_gradients")
        if trainer.gradient_clip_val or any(overrides_method(model, name, pl.LightningModule) for name in methods):
            limit, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            self._clip_gradients(model, optimizer, limit, gradient_clip_algorithm=algorithm)
            trainer.strategy.take_assigned_gradients()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to copy the plugin: `with_quick_hooks` made its class, which pickle can't name."""
        kind = type(self).__mro__[1]
        return _quick_copy, (Precision if kind is StepPrecision else kind, self.__dict__)


def _quick_copy(kind: type[Precision], attributes: dict[str, Any]) -> Precision:
    precision = object.__new__(kind)
    precision.__dict__.update(attributes)
    return with_quick_hooks(precision)


def with_quick_hooks(precision: Precision) -> Precision:
    """Return a precision plugin that shares the attributes of `precision` and calls hooks as `StepPrecision` does.

    `StepPrecision` stands between the plugin's class and Lightning's base class, since the methods of other precisions
    call those of the base class.
    """
    kind = type(precision)
    bases = (StepPrecision,) if kind is Precision else (kind, StepPrecision)
    quick: Precision = object.__new__(type(kind.__name__, bases, {"__qualname__": kind.__qualname__}))
    quick.__dict__ = precision.__dict__
    return quick


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


class StepLogs(_LoggerConnector):
    """Corrects what is logged: the values of steps, epochs and evaluations, their weights, and their step."""

    trainer: Any

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._logs_steps = self._each_step = self._reads_early = False
        self._reduced = -1  # the step whose values were reduced last
        self._named = False  # whether a line has named a read of values that are not reduced

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """Set the weight of means that hooks log: the samples, which Lightning can't count in a `StepBatch`."""
        super().on_batch_start(batch, dataloader_idx)
        trainer = self.trainer
        if not isinstance(batch, StepBatch) and trainer.evaluating:
            trainer.strategy.start_evaluation_batch()
            split, number = evaluated_split(trainer), trainer.evaluated_batch
            trainer._results.batch_size = data_of(trainer).samples_of_batch(split, number)

    def on_batch_end(self) -> None:
        """Let the strategy check what the module's hooks of an evaluation batch have done, and reduce a step's values.

        Values that nothing reads in this step are reduced later.
        """
        trainer = self.trainer
        if not trainer.training:
            if trainer.evaluating:  # this is slow
                trainer.strategy.end_evaluation_batch()
            super().on_batch_end()
            return
        results: TrainingLogs = trainer._results
        results.end_step(results.batch.num_local_samples)  # type: ignore[union-attr]
        if self.step_is_read:
            self.reduce_step()
            super().on_batch_end()
        results.batch = results.batch_size = None

    # --- training ---

    def begin_fit(self) -> None:
        """Find out in which steps something reads what training logs. Every rank calls this."""
        trainer = self.trainer
        several = trainer.world_size > 1 and not trainer.strategy.staged
        results = trainer.fit_loop.epoch_loop._results
        results.alone, results.speaks = not several, trainer.is_global_zero
        plateaus = any(each.reduce_on_plateau and each.interval == "step" for each in trainer.lr_scheduler_configs)
        timed = any(getattr(each, "_train_time_interval", None) for each in trainer.callbacks)
        reads = plateaus or timed, _read_metrics(trainer.lightning_module, *trainer.callbacks)
        ranks = gather_objects((bool(trainer.loggers), *reads)) if several else [(True, *reads)]
        self._logs_steps, follows, self._reads_early = map(any, zip(*ranks, strict=True))
        self._each_step = follows or self._reads_early

    @property
    def step_is_read(self) -> bool:
        """Whether something reads what the step just taken has logged. All ranks have the same answer."""
        trainer, step = self.trainer, self.trainer.global_step
        if self._each_step or trainer.fast_dev_run or validation_or_epoch_end_follows(trainer):
            return True
        every = trainer.log_every_n_steps
        saving = (getattr(each, "_every_n_train_steps", 0) for each in trainer.checkpoint_callbacks)
        return bool(self._logs_steps and every and step % every == 0) or any(n and step % n == 0 for n in saving)

    def reduce_step(self, early: bool = False) -> None:
        """Reduce what the current step has logged so far. Every rank calls this.

        Args:
            early: this is for the hooks between the passes and the optimizer step, if some read it.
        """
        results: TrainingLogs = self.trainer.fit_loop.epoch_loop._results
        if (early and not self._reads_early) or results.alone:
            return
        results.reduce(gather_objects, on_step=True)
        self._reduced = self.trainer.global_step
        self._refuse_uncertain(results)

    def reduce_epoch(self) -> None:
        """Reduce what was logged since the epoch began. Every rank calls this."""
        results: TrainingLogs = self.trainer.fit_loop.epoch_loop._results
        if not results.alone:
            results.reduce(gather_objects, on_step=False)
            self._refuse_uncertain(results)

    def _refuse_uncertain(self, results: Any) -> None:
        """Refuse to follow a value that differs between ranks, since one device would have another one.

        Raises:
            UserError: something follows it.
        """
        if not results.uncertain or self.trainer.state.fn != "fit":
            return
        for name, fx in results.uncertain.items():
            base, suffix, number = name.partition("/dataloader_idx_")
            for owner, monitor in _monitors(self.trainer):
                if monitor in (name, f"{base}_step{suffix}{number}", f"{base}_epoch{suffix}{number}"):
                    raise UserError(f"{owner} can't follow this value, since {differs(name, fx)}: {remedy(fx)}")

    def update_train_step_metrics(self) -> None:
        """Log the values of a step, if they were reduced: a step that ends a run early is no step to log."""
        results: TrainingLogs = self.trainer._results
        if results.alone or self._reduced == self.trainer.global_step:
            super().update_train_step_metrics()

    @property
    def callback_metrics(self) -> Any:
        """The values that callbacks may follow."""
        self._name_early_read()
        return super().callback_metrics

    @property
    def logged_metrics(self) -> Any:
        """The values that loggers get."""
        self._name_early_read()
        return super().logged_metrics

    @property
    def progress_bar_metrics(self) -> Any:
        """The values of the progress bar. Without such values nothing is read, which would wait for a GPU."""
        if any(item.meta.prog_bar for item in (self.trainer._results or {}).values()):
            return super().progress_bar_metrics
        return self._progress_bar_metrics

    def _name_early_read(self) -> None:
        """Name a read by a program of the user in a step whose values are not reduced."""
        results, trainer = self.trainer._results, self.trainer
        if not isinstance(results, TrainingLogs) or results.alone or self._first_loop_iter is None or self._named:
            return
        if self._reduced == trainer.global_step or not results.unread:
            return
        reader = sys._getframe(3).f_globals.get("__name__", "")
        if not reader.startswith(("lightning.", "lockstep.")):
            self._named = True
            LOG.warning(
                f"{reader} reads what training has logged, but this step's values are not reduced over the ranks, so "
                f"it gets those of step {max(self._reduced, 0)}: read it in a method of the module or of a callback"
            )

    # --- epochs and evaluations ---

    def epoch_end_reached(self) -> None:
        """Let all ranks compute the same metrics, in the same order, when an epoch of training or evaluation ends.

        Otherwise a rank that has not logged a metric, since it had no sample, does not join its computation.
        """
        trainer = self.trainer
        if trainer.training and self._first_loop_iter is not None:
            self.reduce_step()
            super().on_batch_end()  # it keeps the values of the last step
        super().epoch_end_reached()
        trainer.strategy.prepare_metrics()
        has_metrics = any(isinstance(part, Metric) for part in trainer.lightning_module.modules())
        if has_metrics and trainer.world_size > 1 and not trainer.strategy.staged:
            module, sync_dist_fn = trainer.lightning_module, trainer.strategy.reduce
            add_missing_metrics(trainer._results, gather_objects, module, sync_dist_fn)
        if trainer.training:
            self.reduce_epoch()

    def on_epoch_end(self) -> None:
        """Reduce what callbacks have logged at the end of an epoch, before it is read; then save what is due.

        Lightning calls this after the last hook of an epoch's end.
        """
        self.reduce_epoch()
        super().on_epoch_end()
        if self.trainer.training:
            self.trainer.saves.complete_step(ends_epoch=True)

    def update_eval_epoch_metrics(self) -> Any:
        """Reduce logged values over the ranks. Lightning would show those of rank zero.

        All ranks call this after an evaluation's last batch, and again after its last hook that may log.
        """
        trainer: Any = self.trainer
        results: EvaluationLogs = trainer._results
        results.speaks = trainer.is_global_zero
        several = trainer.world_size > 1 and not trainer.strategy.staged  # every stage sees all samples
        samples = data_of(trainer).num_local_samples(evaluated_split(trainer)) if several else 1
        results.reduce(gather_objects if several else lambda value: [value], samples, trainer.strategy.reduce)
        self._refuse_uncertain(results)
        if trainer.sanity_checking:  # for `MonitorCheck`: Lightning drops the values of each of several loaders
            self._callback_metrics.update(self.metrics["callback"])
        return super().update_eval_epoch_metrics()

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Log values at the step in which they were logged. Lightning logs them one step early.

        Lightning counts a step after it has logged its values. After a resume, the dashboard would keep one point of
        the lost steps beside the new ones.

        See it: `self.log("x", ...)` in `training_step` with log_every_n_steps=1; the first point is at step 0.
        """
        loop = self.trainer.fit_loop.epoch_loop
        counted, loop._batches_that_stepped = loop._batches_that_stepped, loop.global_step
        super().log_metrics(metrics, step)
        loop._batches_that_stepped = counted


class AfterStart(pl.Callback):
    """A callback with a hook that comes after `on_train_start` of all callbacks and of the module.

    See it: a module that freezes in `on_train_start`, and what a callback's own `on_train_start` sees of it.
    """

    def after_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Act before the first epoch of this fit."""


class StepLoaderSource(_DataLoaderSource):
    """Gives a loop our loaders, and leaves the methods of a data module to users, who get their own loaders.

    See it: `self.trainer.datamodule.train_dataloader()` in a hook.
    """

    def dataloader(self) -> Any:
        """Return the loader of a loop."""
        loader_of_loop = getattr(self.instance, "loader_of_loop", None)
        return super().dataloader() if loader_of_loop is None else loader_of_loop(self.name)


def _monitors(trainer: Any) -> list[tuple[str, str]]:
    """Return what follows a metric, in words, and the metric's name."""
    callbacks = [(type(each).__name__, getattr(each, "monitor", None)) for each in trainer.callbacks]
    plateaus = [each for each in trainer.lr_scheduler_configs if each.reduce_on_plateau]
    owners = [*callbacks, *((type(each.scheduler).__name__, each.monitor) for each in plateaus)]
    return [(f"{owner}(monitor={metric!r})", metric) for owner, metric in owners if isinstance(metric, str)]


READ = {"callback_metrics", "logged_metrics"}  # attributes of a Trainer with what was logged


def _read_metrics(*things: Any) -> bool:
    """Check whether the code of a user's classes reads what training logs."""
    kinds = {kind for thing in things for kind in type(thing).__mro__}
    users = [
        kind for kind in kinds if not kind.__module__.startswith(("lightning.", "lockstep.", "torch.", "builtins"))
    ]
    codes: list[Any] = [getattr(value, "__code__", None) for kind in users for value in vars(kind).values()]
    while codes:
        code = codes.pop()
        if READ & set(getattr(code, "co_names", ())):
            return True
        codes += [each for each in getattr(code, "co_consts", ()) if hasattr(each, "co_names")]
    return False


class StepFitLoop(_FitLoop):
    """Counts each epoch once, reduces what was logged before something follows it, and runs until its steps are made.

    See it: `on_train_epoch_start` with `raise StopIteration`; the run ends as if it were complete.
    """

    trainer: Any
    epoch_loop: Any

    def setup_data(self) -> None:
        """Make the loader. The order of the samples applies the user's limit of batches, if it has one."""
        trainer = self.trainer
        limit = trainer.limit_train_batches
        try:
            if limit and data_of(trainer).order.most is not None:
                trainer.limit_train_batches = 1.0
            super().setup_data()
        finally:
            trainer.limit_train_batches = limit

    def on_run_start(self) -> None:
        """Call the hooks of the start, then those after it."""
        super().on_run_start()
        for callback in self.trainer.callbacks:
            if isinstance(callback, AfterStart):
                callback.after_train_start(self.trainer, self.trainer.lightning_module)

    def on_advance_start(self) -> None:
        """Begin an epoch. A checkpoint that a hook asks for waits for the others, which a resumed run does not call."""
        self.trainer.saves.begin_step()
        self.epoch_loop.seed_hooks(Hooks.EPOCH_START, self.trainer.current_epoch)
        with no_silent_end():
            super().on_advance_start()

    def advance(self) -> None:
        """Run an epoch; see `no_silent_end`."""
        with no_silent_end():
            super().advance()

    def _iteration_based_training(self) -> bool:
        """Return False, so that each epoch is counted once.

        See it: a run with max_steps, resumed from a checkpoint of an epoch's end; `current_epoch` is one too large.
        """
        return False

    def on_advance_end(self) -> None:
        """End an epoch as Lightning does, but reduce what `on_train_epoch_end` has logged before callbacks follow it.

        See it: a module that logs the mean of a list in `on_train_epoch_end`, with EarlyStopping on it, on two ranks.
        """
        trainer, connector = self.trainer, self.trainer._logger_connector
        connector.epoch_end_reached()
        self.epoch_progress.increment_processed()
        self.epoch_loop.seed_hooks(Hooks.EPOCH_END, trainer.current_epoch)
        with no_silent_end():
            call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=False)
            call._call_lightning_module_hook(trainer, "on_train_epoch_end")
            connector.reduce_epoch()
            call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=True)
        connector.on_epoch_end()
        if not self.restarting and self.epoch_loop._num_ready_batches_reached():
            self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        self.epoch_loop._batches_that_stepped -= 1  # loggers expect the step of the last batch
        connector.update_train_epoch_metrics()
        self.epoch_loop._batches_that_stepped += 1
        self.epoch_progress.increment_completed()


class WatchedLoop:
    """For a loop over evaluation batches: each must be evaluated, a limit counts all ranks', and the end saves.

    See it: `validation_step` with `raise StopIteration`; Lightning takes it for the end of the data. A module that
    changes a buffer in `on_validation_end`; a ModelCheckpoint with a monitor saves it before. limit_val_batches=2 on
    two ranks; Lightning evaluates two batches of each rank.
    """

    _data_fetcher: Any
    trainer: Any
    _prefix: str
    num_dataloaders: int

    def setup_data(self) -> None:
        """Make the loader, whose length is what the limit of batches leaves. The data module applies the limit."""
        trainer, name = self.trainer, f"limit_{self._prefix}_batches"
        limit, trainer.evaluated_loader = getattr(trainer, name), None
        try:
            trainer.limits = {name: limit}
            setattr(trainer, name, 1.0 if limit else limit)
            super().setup_data()  # type: ignore[misc]
        finally:
            trainer.limits = {}
            setattr(trainer, name, limit)

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, *args: Any) -> None:
        self._set_position(batch_idx, dataloader_idx)
        with no_silent_end():
            super()._evaluation_step(batch, batch_idx, dataloader_idx, *args)  # type: ignore[misc]

    def _predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int, *args: Any) -> None:
        self._set_position(batch_idx, dataloader_idx)
        with no_silent_end():
            super()._predict_step(batch, batch_idx, dataloader_idx, *args)  # type: ignore[misc]

    def _set_position(self, batch_idx: int, dataloader_idx: int) -> None:
        self.trainer.evaluated_loader = dataloader_idx if self.num_dataloaders > 1 else None
        self.trainer.evaluated_batch = batch_idx

    def on_run_end(self) -> Any:
        """End the loop. After a validation inside an epoch, run its hooks and then save.

        Raises:
            StepRefused: its loader has ended early.
        """
        trainer = self.trainer
        trainer.evaluated_loader = None
        batches, expected = self._data_fetcher.fetched, self._data_fetcher.length
        if expected is not None and batches != expected:
            stage = trainer.state.stage.value
            raise StepRefused(f"{stage}: {batches} of {expected} batches were evaluated: the loader must yield all")
        if trainer.state.fn == TrainerFn.FITTING:
            trainer.fit_loop.epoch_loop.seed_hooks(Hooks.EVALUATION_END, trainer.global_step)
        outputs = super().on_run_end()  # type: ignore[misc]
        in_fit = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if in_fit and not trainer.is_last_batch:  # else the end of the epoch follows
            trainer.saves.complete_step()
        return outputs


class WatchedEvaluation(WatchedLoop, _EvaluationLoop):
    """Lightning's loop of an evaluation, see `WatchedLoop`."""

    @property
    def _prefix(self) -> str:  # type: ignore[override]
        return self._stage.dataloader_prefix or ""


class WatchedPrediction(WatchedLoop, _PredictionLoop):
    """Lightning's loop of a prediction, see `WatchedLoop`. A BasePredictionWriter gets lists of numbers, not ranges."""

    _prefix = "predict"

    def _store_data_for_prediction_writer(self, batch_idx: int, dataloader_idx: int) -> bool:
        on_epoch = super()._store_data_for_prediction_writer(batch_idx, dataloader_idx)
        self.current_batch_indices = list(self.current_batch_indices)
        if numbers := self.epoch_batch_indices[dataloader_idx]:
            numbers[-1] = list(numbers[-1])
        return on_epoch


def watched_loop(loop: Any) -> Any:
    """Return a loop over evaluation batches as Lightning has made `loop`, see `WatchedLoop`."""
    if isinstance(loop, _PredictionLoop):
        return WatchedPrediction(loop.trainer, loop.inference_mode)
    return WatchedEvaluation(loop.trainer, loop._trainer_fn, loop._stage, loop.verbose, loop.inference_mode)


class StepEpochLoop(_TrainingEpochLoop):
    """Gives a resumed run the same steps, epochs and schedules as a run that was not stopped."""

    trainer: Any
    _results: Any

    def __init__(self, trainer: pl.Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.val_loop = watched_loop(self.val_loop)
        # by interval, the step of the last update of schedules that follow a metric
        self._followed: dict[str, int] = {}
        self._logged: dict[str, Any] = {}  # from a checkpoint: what was logged since its epoch began
        self.validation_is_due = False  # by the clock
        self._next_look, self._last_look = 0, (0, 0.0)  # at the clock: the step; step and time

    @property
    def global_step(self) -> int:
        """Number of optimizer steps since the run began."""
        return self.automatic_optimization.optim_progress.optimizer_steps

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return the loop's state with what was logged since the epoch began, unless it ends with this checkpoint."""
        state, results, trainer = super().on_save_checkpoint(), self._results, self.trainer
        if trainer.state.fn == "fit" and not self._num_ready_batches_reached():
            gather = (lambda value: [value]) if results.alone else gather_objects
            if logged := results.state(gather):
                state["logged"] = logged
        return state

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Reopen an epoch that `max_steps` ended early. Lightning has counted it and would skip its rest.

        See it: max_steps=5 of epochs of 4 steps, resumed with max_steps=8; the second epoch has one step.
        """
        super().on_load_checkpoint(state_dict)
        self._logged = state_dict.get("logged", {})
        fit_loop = self.trainer.fit_loop
        fit_loop._combined_loader = None  # `estimated_stepping_batches` made it, before the step was restored
        cut = self.batch_progress.current.completed < data_of(self.trainer).order.steps_per_epoch
        if cut and not self.batch_progress.is_last_batch:
            for count in (fit_loop.epoch_progress.current, fit_loop.epoch_progress.total):
                count.processed = count.completed

    def on_run_start(self, data_fetcher: Any) -> None:
        """Call the module's `on_train_epoch_start` also if a run continues inside an epoch.

        It may set Python attributes, which no checkpoint has. What it does to tensors and to the optimizer's groups is
        in the checkpoint already, so this is undone. Callbacks are left out, since they have their own state.
        Validation batches are counted, which Lightning does when a validation is first due:
        `validation_or_epoch_end_follows` asks for them before.

        See it: a module that resets a counter there, resumed inside an epoch; check_val_every_n_epoch=2.
        """
        super().on_run_start(data_fetcher)
        if self.trainer.enable_validation:
            self.trainer.validating = True
            self.val_loop.setup_data()
            self.trainer.training = True
        self._batches_that_stepped = self.global_step
        self.validation_is_due, self._next_look = False, 0
        self._last_look = self.global_step, time.monotonic()
        self._results.restore(self._logged, takes_all=self.trainer.is_global_zero)
        self._logged = {}
        self.trainer._logger_connector.begin_fit()
        self._followed = dict.fromkeys(("step", "epoch"), self.global_step)
        if self.trainer.fit_loop.restarted_mid_epoch:
            with unchanged(self.trainer):
                self.trainer.fit_loop.epoch_loop.seed_hooks(Hooks.EPOCH_START, self.trainer.current_epoch)
                call._call_lightning_module_hook(self.trainer, "on_train_epoch_start")

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Validate if it is due; see `no_silent_end`, which takes 1 us more."""
        try:
            super().on_advance_end(data_fetcher)
        except ENDS as end:
            raise refused_end(end) from end

    def _accumulated_batches_reached(self) -> bool:
        """Return True, since a batch of this loop is a whole step; `accumulate_grad_batches` is for users to read."""
        return True

    def no_longer_restarting(self) -> None:
        """Clear the restart flag after the first step of a resumed run.

        Otherwise schedules that follow a metric are not updated at the end of this epoch. This loop's own flag is
        cleared before, if the run continued in a validation.
        """
        if self.trainer.fit_loop._restarting:
            self.trainer.fit_loop._restarting = False

    def resumes_in_validation(self, data_fetcher: Any) -> bool:
        """Check whether the run continues from a checkpoint that a validation saved, so that no step comes first.

        This is a part of Lightning's `advance`.
        """
        if self.restarting and self._should_check_val_fx(data_fetcher):
            if self.val_loop.restarted_mid_evaluation:
                return True
            if self.restarted_on_last:
                self._skip_next_val = True
                return True
            self.val_loop.increment_progress_to_evaluation_end()
        if self.val_loop.restarting:  # the assignment looks at all attributes of a loop
            self.val_loop.restarting = False
        return False

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Update schedules that follow a metric once per step, before the step is saved; see `follow_metrics`.

        The other schedules are updated as Lightning does, but by `call_of_module`.
        """
        trainer = self.trainer
        follows = any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
        if update_plateau_schedulers:
            if follows and self._followed[interval] != self.global_step:
                self._followed[interval] = self.global_step
                super().update_lr_schedulers(interval, update_plateau_schedulers=True)
            return
        number = 1 + (self.batch_idx if interval == "step" else trainer.current_epoch)
        for config in trainer.lr_scheduler_configs:
            if config.interval == interval and number % config.frequency == 0 and not config.reduce_on_plateau:
                self.scheduler_progress.increment_ready()
                call_of_module(trainer, "lr_scheduler_step", config.scheduler, None)
                self.scheduler_progress.increment_completed()
        if interval == "step" and follows and not validation_or_epoch_end_follows(trainer):
            self.update_lr_schedulers("step", update_plateau_schedulers=True)

    def follow_metrics(self) -> None:
        """Update schedules that follow a metric, before a step or the end of an epoch is saved.

        Lightning updates them after it has saved, so a resumed run would miss the update.
        """
        self.update_lr_schedulers("step", update_plateau_schedulers=True)
        if self._num_ready_batches_reached() and not self.trainer.fit_loop.restarting:
            self.update_lr_schedulers("epoch", update_plateau_schedulers=True)

    def look_at_clock(self) -> None:
        """Find out whether a validation is due after the step just taken, if a time is the interval between them.

        The clock of rank zero decides, so that all ranks validate after the same step. Several ranks look at it about
        once a second; at each look they agree on the step of the next one.

        See it: val_check_interval="00:00:00:10" with ddp; each rank of Lightning reads its own clock.
        """
        trainer, step = self.trainer, self.global_step
        if trainer._val_check_time_interval is None:
            return
        self.validation_is_due = False
        if step < self._next_look:
            return
        now, (before, then) = time.monotonic(), self._last_look
        left, steps = trainer._val_check_time_interval - (now - trainer._last_val_time), 1
        if trainer.world_size > 1:
            per_second = (step - before) / max(now - then, 1e-3)
            steps = max(1, min(1000, int(per_second * min(left, SECONDS_BETWEEN_LOOKS))))
            left, steps = broadcast_from_rank_zero((left, steps))
        self.validation_is_due, self._next_look, self._last_look = left <= 0, step + steps, (step, now)

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        """Validate also after a run's last step, inside an epoch, so that the final weights have a result."""
        if not self._should_check_val_epoch():
            return False
        trainer = self.trainer
        if trainer._val_check_time_interval is None:
            return super()._should_check_val_fx(data_fetcher) or is_last_step(trainer)
        stops = trainer.should_stop and trainer.fit_loop._can_stop_early
        return bool(stops or self.validation_is_due or is_last_step(trainer))


def take_identity(adapter: Any, owner: pl.LightningDataModule) -> None:
    """Give the data module of a Trainer the hyperparameters of a user's, and the name of its class.

    Lightning logs and saves the hyperparameters, and saves the state of a data module under the name of its class.

    See it: MyData.load_from_checkpoint; without this, it makes one with the defaults.
    """
    for name in ("_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams"):
        if name in vars(owner):
            vars(adapter)[name] = vars(owner)[name]
    kind = type(owner)
    adapter.__class__ = type(kind.__name__, (type(adapter),), {"__qualname__": kind.__qualname__})


def unusual_ddp_option(strategy: DDPStrategy) -> str:
    """Return the name of an option of Lightning's DDPStrategy that changes what is sent or who starts processes.

    Others (`find_unused_parameters`, `static_graph`, sizes of buckets) only tune torch's DDP, which is not used.
    Lightning has no public names for them.
    """
    names = {"ddp_comm_hook": strategy._ddp_comm_hook, "model_averaging_period": strategy._model_averaging_period}
    named = next((name for name, value in names.items() if value is not None), "")
    return named or ("" if strategy._start_method == "popen" else f"start_method={strategy._start_method}")


def remove_logged(trainer: pl.Trainer) -> None:
    """Drop the values that were logged for the last evaluation batch."""
    for _, result in trainer._results.valid_items() if trainer._results else ():  # not those of earlier evaluations
        if result.is_tensor:
            result.reset()
            result.has_reset = False  # otherwise Lightning skips its reduction, for which other ranks wait
        result._forward_cache = None  # the value of the step


def current_hook(module: Any) -> str:
    """Return the name of a LightningModule's or callback's hook that runs, or "" outside of hooks."""
    return getattr(module, "_current_fx_name", None) or ""


@contextmanager
def without_logging(trainer: Any) -> Iterator[None]:
    """Return a context in which what training logs, by `self.log` or by a logger, and its profile leave no trace."""
    loop, connector, profiler = trainer.fit_loop.epoch_loop, trainer._logger_connector, trainer.profiler
    results, loggers, current = loop._results, trainer.loggers, connector._current_fx
    loop._results, trainer.loggers = TrainingLogs(), [DummyLogger() for _ in loggers]
    trainer.profiler = NoProfiler()  # torch's counts each call of `training_step` as a step
    try:
        yield
    finally:
        loop._results, trainer.loggers, connector._current_fx = results, loggers, current
        trainer.profiler = profiler


@contextmanager
def unchanged(trainer: Any) -> Iterator[None]:
    """Return a context after which the module's tensors and the options of the optimizer's groups are as before."""
    tensors = SavedTensors(trainer.lightning_module)
    groups = [group for each in trainer.optimizers for group in each.param_groups]
    options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    yield
    tensors.restore()
    for group, values in zip(groups, options, strict=True):
        group |= values


@contextmanager
def setup_was_called(module: pl.LightningModule) -> Iterator[None]:
    """Return a context in which Lightning's call of a module's `prepare_data` and `setup` does nothing.

    The sets of a module's own loaders must be known before Lightning's `fit` begins, and `setup` opens them.

    See it: a module with `self.train, self.val = random_split(...)` in `setup`; a second call makes another split.
    """
    names = ("prepare_data", "setup")

    def end(stage: str) -> None:
        for name in names:
            vars(module).pop(name, None)

    vars(module).update(zip(names, (lambda: None, end), strict=True))
    try:
        yield
    finally:
        end("")


def last_checkpoints(trainer: pl.Trainer) -> list[str]:
    """Return the paths of the last checkpoints that the Trainer's ModelCheckpoint callbacks have written, in any run.

    Lightning looks for them in `fit(ckpt_path="last")` only.
    """
    callbacks = (each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint))
    return [str(path) for callback in callbacks for path in callback._find_last_checkpoints(trainer)]


def logged_objects(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the torchmetrics objects that the running evaluation has logged, by the names of the metrics."""
    if (results := trainer._results) is None:
        return {}
    values = {results._forked_name(result, False)[0]: result.value for result in results.values()}
    return {name: value for name, value in values.items() if isinstance(value, Metric)}


def is_last_step(trainer: pl.Trainer) -> bool:
    """Check whether the step just taken is the last one of the run."""
    last_epoch = trainer.current_epoch + 1 == trainer.max_epochs
    return trainer.global_step == trainer.max_steps or (last_epoch and trainer.is_last_batch)


def validation_or_epoch_end_follows(trainer: pl.Trainer) -> bool:
    """Check whether a validation, or the end of an epoch, follows the step just taken.

    A checkpoint must wait for it. A run that resumed from an earlier checkpoint would miss the validation, and with it
    the best checkpoint and the means of the epoch.
    """
    if trainer.is_last_batch:
        return True
    if not (trainer.enable_validation and any(trainer.num_val_batches)):
        return False
    every, step = trainer.check_val_every_n_epoch, trainer.global_step
    if every is not None:  # then Lightning counts the steps of each epoch
        if (trainer.current_epoch + 1) % every:
            return is_last_step(trainer)
        step = trainer.fit_loop.epoch_loop.batch_idx + 1
    if trainer._val_check_time_interval is not None:  # type: ignore[attr-defined]
        return trainer.fit_loop.epoch_loop.validation_is_due or is_last_step(trainer)  # type: ignore[attr-defined]
    return step % int(trainer.val_check_batch or 1) == 0 or is_last_step(trainer)
