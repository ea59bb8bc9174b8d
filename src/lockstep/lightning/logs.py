"""When what a user's code logs is reduced over the ranks, shown, and followed."""

import logging
import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from torchmetrics import Metric

from lockstep.errors import UserError
from lockstep.launch.process_group import gather_objects
from lockstep.lightning.epochs import validation_or_epoch_end_follows
from lockstep.lightning.logged_values import differs, remedy
from lockstep.lightning.results import EvaluationLogs, TrainingLogs, add_missing_metrics
from lockstep.step.batch import StepBatch, data_of, evaluated_split

LOG = logging.getLogger("lockstep")


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
            if trainer.evaluating:
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
        trainer, several = self.trainer, data_of(self.trainer).layout.replicas > 1
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
        if not reader.startswith(("lightning.", "lockstep")):
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
        if has_metrics and data_of(trainer).layout.replicas > 1:
            module, sync_dist_fn = trainer.lightning_module, trainer.strategy.reduce
            add_missing_metrics(trainer._results, gather_objects, module, sync_dist_fn)
        if trainer.training:
            self.reduce_epoch()
            # A progress bar reads them on rank zero alone.
            trainer._results.metrics(on_step=False)

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
        several = data_of(trainer).layout.replicas > 1
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
    users = [kind for kind in kinds if not kind.__module__.startswith(("lightning.", "lockstep", "torch.", "builtins"))]
    codes: list[Any] = [getattr(value, "__code__", None) for kind in users for value in vars(kind).values()]
    while codes:
        code = codes.pop()
        if READ & set(getattr(code, "co_names", ())):
            return True
        codes += [each for each in getattr(code, "co_consts", ()) if hasattr(each, "co_names")]
    return False


def remove_logged(trainer: pl.Trainer) -> None:
    """Drop the values that were logged for the last evaluation batch."""
    for _, result in trainer._results.valid_items() if trainer._results else ():  # not those of earlier evaluations
        if result.is_tensor:
            result.reset()
            result.has_reset = False  # otherwise Lightning skips its reduction, for which other ranks wait
        result._forward_cache = None  # the value of the step


def logged_objects(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the torchmetrics objects that the running evaluation has logged, by the names of the metrics."""
    if (results := trainer._results) is None:
        return {}
    values = {results._forked_name(result, False)[0]: result.value for result in results.values()}
    return {name: value for name, value in values.items() if isinstance(value, Metric)}
