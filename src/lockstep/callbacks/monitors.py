"""Refuse, before the first step, callbacks and schedules whose metric nothing logs, or whose mode contradicts it."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage

from lockstep.checkpoint.callback import Checkpoint, unlogged_metric_message
from lockstep.config.metrics import MODE_OF, MODES, contradiction, mode_of_object
from lockstep.errors import UserError
from lockstep.lightning.logs import logged_objects
from lockstep.step.trial import SavedAttributes


class MonitorCheck(pl.Callback):
    """Refuses, after Lightning's sanity check, metrics of validation that something monitors and nothing logs.

    The sanity check restores the random state and removes what was logged. A Trainer without one has one of a batch if
    something monitors such a metric; then this class restores the module's own counters. A run that continues from a
    checkpoint has no sanity check.

    Args:
        callbacks: all callbacks of the run that may monitor a metric, by their names for messages.
        monitor_setting: the name of the schedule's `monitor` for messages.
        unknown: the refusals of metrics of validation whose best value is unknown, by metric. They are raised if the
            module logs the metric; if not, the message names what it logs.
    """

    def __init__(
        self, callbacks: Mapping[str, pl.Callback], monitor_setting: str, unknown: Mapping[str, UserError] | None = None
    ) -> None:
        self._unknown = dict(unknown or {})
        self._callbacks = dict(callbacks)
        self._monitor_setting = monitor_setting
        self._before: SavedAttributes | None = None
        self._adds_check = False
        self._logged_in_check: set[str] = set()

    def on_fit_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self._check_modes(trainer, MODE_OF)
        self._adds_check = self._adds_check or not trainer.num_sanity_val_steps
        if self._adds_check:
            monitored = any(metric.startswith("val") for _, metric, _ in self._monitors(trainer))
            trainer.num_sanity_val_steps = int(monitored)

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._adds_check:
            self._before = SavedAttributes(pl_module)

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._before is not None:
            self._before.restore()
            self._before = None
        self._check_modes(trainer, {name: mode_of_object(each) for name, each in logged_objects(trainer).items()})
        logged = self._logged_in_check = set(trainer.callback_metrics)
        # A module may name its metrics by the stage, or log other ones in this check.
        of_check = any(RunningStage.SANITY_CHECKING.value in each.lower() for each in logged)
        if not logged or of_check or _reads_sanity_checking(pl_module):
            return
        for key, metric, mode in self._monitors(trainer):
            if metric.startswith("val") and metric not in logged:
                raise UserError(unlogged_metric_message(key, metric, logged, mode is not None))
        self._refuse_unknown()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._refuse_unknown()  # no batch was evaluated before the first step

    def _refuse_unknown(self) -> None:
        for refusal in self._unknown.values():
            raise refusal

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Replace Lightning's error about a missing metric, for example one that training should log."""
        if "conditioned on metric" not in str(exception):
            return
        writer: Any = trainer.strategy.checkpoint_io
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, Checkpoint):  # so that the run can continue with another monitor
                callback.save(trainer)
                writer.wait()
        logged = set(trainer.callback_metrics)
        for key, metric, mode in self._monitors(trainer):
            if metric in logged:
                continue
            message = unlogged_metric_message(key, metric, logged, mode is not None)
            if metric in self._logged_in_check:
                message = f"{key}={metric}: no validation has run by step {trainer.global_step}: validate earlier"
            raise UserError(message) from exception
        raise UserError(str(exception)) from exception

    def _check_modes(self, trainer: Any, modes: Mapping[str, str | None]) -> None:
        """Refuse a mode that contradicts what is known of its metric."""
        for key, metric, mode in self._monitors(trainer, strict=False):
            right = modes.get(metric)
            if right is None or mode not in MODES or mode == right or metric in self._unknown:
                continue
            remedy = f"give {key.replace('monitor', 'mode')}={right}"
            if key.startswith("configure_"):
                remedy = f"use mode={right}"
            if MODE_OF.get(metric, right) != right:  # then the name of the metric misleads
                remedy = "log it under another name"
            raise contradiction(f"{key}={metric} with mode={mode}", metric, right, remedy)

    def _monitors(self, trainer: Any, strict: bool = True) -> list[tuple[str, str, str | None]]:
        """Return what is monitored as (key, metric, mode). If `strict`, metrics that may be missing are left out."""
        owners: list[tuple[str, Any, Any]] = [(f"{name}.monitor", each, each) for name, each in self._callbacks.items()]
        plateaus = [each for each in trainer.lr_scheduler_configs if each.reduce_on_plateau]
        owners += [(self._monitor_setting, each, each.scheduler) for each in plateaus]
        monitors = []
        for key, owner, compares in owners:
            metric = getattr(owner, "monitor", None)
            if isinstance(metric, str) and (getattr(owner, "strict", True) or not strict):
                monitors.append((key, metric, getattr(compares, "mode", None)))
        return monitors


def _reads_sanity_checking(module: pl.LightningModule) -> bool:
    """Check whether code of the module's own classes reads `trainer.sanity_checking`."""
    kinds = type(module).__mro__
    user_classes = kinds[: kinds.index(pl.LightningModule)]
    codes = [getattr(value, "__code__", None) for kind in user_classes for value in vars(kind).values()]
    return any(code is not None and "sanity_checking" in code.co_names for code in codes)
