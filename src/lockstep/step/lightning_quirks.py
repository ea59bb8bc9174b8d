"""Workarounds for behaviour of Lightning 2.6, each in one place, so that each can be dropped alone.

Every class or method names the behaviour and how to see it. tests/step/test_loop.py and
tests/test_promise_5_evaluation.py fail when the private names used here change.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torchmetrics import Metric

from lockstep.launch.process_group import gather_objects
from lockstep.step.batch import StepBatch, data_of
from lockstep.step.evaluation_logs import EvaluationLogs, TrainingLogs, add_missing_metrics
from lockstep.step.passes import overrides_method


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
    """Corrects the weights of means, the values of an evaluation, and the step of logged values."""

    trainer: Any

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """Set the weight of means that hooks log: the samples, which Lightning can't count in a `StepBatch`."""
        super().on_batch_start(batch, dataloader_idx)
        if isinstance(batch, StepBatch):
            results: Any = self.trainer._results
            results.batch_size = batch.num_local_samples
        elif self.trainer.evaluating:
            self.trainer.strategy.start_evaluation_batch()

    def on_batch_end(self) -> None:
        """Let the strategy check what the module's hooks of an evaluation batch have done."""
        if not self.trainer.training and self.trainer.evaluating:  # the latter is slow
            self.trainer.strategy.end_evaluation_batch()
        super().on_batch_end()

    def epoch_end_reached(self) -> None:
        """Let all ranks compute the same metrics, in the same order, when an epoch of training or evaluation ends.

        Otherwise a rank that has not logged a metric, since it had no sample, does not join its computation.
        """
        super().epoch_end_reached()
        trainer = self.trainer
        trainer.strategy.prepare_metrics()
        has_metrics = any(isinstance(part, Metric) for part in trainer.lightning_module.modules())
        if has_metrics and trainer.world_size > 1 and not trainer.strategy.staged:
            module, sync_dist_fn = trainer.lightning_module, trainer.strategy.reduce
            add_missing_metrics(trainer._results, gather_objects, module, sync_dist_fn)

    def update_eval_epoch_metrics(self) -> Any:
        """Reduce logged values over the ranks. Lightning would show those of rank zero.

        All ranks call this after an evaluation's last batch, and again after its last hook that may log.
        """
        trainer: Any = self.trainer
        results: EvaluationLogs = trainer._results
        several = trainer.world_size > 1 and not trainer.strategy.staged  # every stage sees all samples
        samples = data_of(trainer).num_local_samples("test" if trainer.testing else "val") if several else 1
        results.reduce(gather_objects if several else lambda value: [value], samples, trainer.strategy.reduce)
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


class StepFitLoop(_FitLoop):
    """Counts each epoch once.

    See it: a run with max_steps that is resumed from a checkpoint of an epoch's end; `current_epoch` is one too large.
    """

    def _iteration_based_training(self) -> bool:
        return False


class StepEpochLoop(_TrainingEpochLoop):
    """Gives a resumed run the same steps, epochs and schedules as a run that was not stopped."""

    trainer: Any

    def __init__(self, trainer: pl.Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        # by interval, the step of the last update of schedules that follow a metric
        self._followed: dict[str, int] = {}

    @property
    def global_step(self) -> int:
        """Number of optimizer steps since the run began."""
        return self.automatic_optimization.optim_progress.optimizer_steps

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Reopen an epoch that `max_steps` ended early. Lightning has counted it and would skip its rest.

        See it: max_steps=5 of epochs of 4 steps, resumed with max_steps=8; the second epoch has one step.
        """
        super().on_load_checkpoint(state_dict)
        fit_loop = self.trainer.fit_loop
        fit_loop._combined_loader = None  # `estimated_stepping_batches` made it, before the step was restored
        cut = self.batch_progress.current.completed < data_of(self.trainer).order.steps_per_epoch
        if cut and not self.batch_progress.is_last_batch:
            for count in (fit_loop.epoch_progress.current, fit_loop.epoch_progress.total):
                count.processed = count.completed

    def on_run_start(self, data_fetcher: Any) -> None:
        """Call the module's `on_train_epoch_start` also if a run continues inside an epoch.

        Callbacks are left out, since they may not expect a second call. Validation batches are counted, which Lightning
        does when a validation is first due: `validation_or_epoch_end_follows` asks for them before.

        See it: a module that resets a counter there, resumed inside an epoch; check_val_every_n_epoch=2.
        """
        super().on_run_start(data_fetcher)
        if self.trainer.enable_validation:
            self.trainer.validating = True
            self.val_loop.setup_data()
            self.trainer.training = True
        self._batches_that_stepped = self.global_step
        self._followed = dict.fromkeys(("step", "epoch"), self.global_step)
        if self.trainer.fit_loop.restarted_mid_epoch:
            call._call_lightning_module_hook(self.trainer, "on_train_epoch_start")

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

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        """Validate also after a run's last step, inside an epoch, so that the final weights have a result."""
        ends = is_last_step(self.trainer) and self._should_check_val_epoch()
        return super()._should_check_val_fx(data_fetcher) or ends


def remove_logged(trainer: pl.Trainer) -> None:
    """Drop the values that were logged for the last evaluation batch."""
    for result in (trainer._results or {}).values():
        if result.has_reset:  # it belongs to an earlier evaluation
            continue
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
    loop._results, trainer.loggers = TrainingLogs(noticed=results.noticed), [DummyLogger() for _ in loggers]
    trainer.profiler = NoProfiler()  # torch's counts each call of `training_step` as a step
    try:
        yield
    finally:
        loop._results, trainer.loggers, connector._current_fx = results, loggers, current
        trainer.profiler = profiler


def last_checkpoints(trainer: pl.Trainer) -> list[str]:
    """Return the paths of the last checkpoints that the Trainer's ModelCheckpoint callbacks have written, in any run.

    Lightning looks for them in `fit(ckpt_path="last")` only.
    """
    callbacks = (each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint))
    return [str(path) for callback in callbacks for path in callback._find_last_checkpoints(trainer)]


def logged_objects(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the torchmetrics objects that the running evaluation has logged, by the names of the metrics."""
    values = {result.meta.name: result.value for result in (trainer._results or {}).values()}
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
    return step % int(trainer.val_check_batch or 1) == 0 or is_last_step(trainer)
