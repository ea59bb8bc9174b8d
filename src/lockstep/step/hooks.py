"""The hooks of a training step, called only where somebody implements them.

Lightning asks every callback and the module at every hook, under a profiler's context: 0.2 ms of a step without any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler


class Hooks:
    """Calls as Lightning does, in its order: the callbacks in theirs, then the module.

    Who implements what is found once, at the first call; make a new one where callbacks may have changed.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer
        self.module: pl.LightningModule = trainer.lightning_module
        self._known: dict[str, tuple[list[Callable[..., Any]], Callable[..., Any] | None]] = {}

    def __call__(self, name: str, *args: Any) -> Any:
        """Returns what the module's hook does."""
        callbacks, own = self._known.get(name) or self._implemented(name)
        if callbacks:
            self.within(name, _each, callbacks, self.trainer, self.module, *args)
        return None if own is None else self.within(name, own, *args)

    def anyone(self, name: str) -> bool:
        """Whether somebody implements a hook."""
        callbacks, own = self._implemented(name)
        return bool(callbacks) or own is not None

    def within(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """`call(*args)`, during which `self.log` takes the hook `name` for the one that runs."""
        state = self.module.__dict__  # nn.Module's own __setattr__ takes 5 us
        before, state["_current_fx_name"] = state["_current_fx_name"], name
        found = call(*args)
        state["_current_fx_name"] = before
        return found

    def _implemented(self, name: str) -> tuple[list[Callable[..., Any]], Callable[..., Any] | None]:
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        found = [getattr(callback, name) for callback in callbacks if overrides(callback, name, pl.Callback)]
        own = getattr(self.module, name) if overrides(self.module, name, pl.LightningModule) else None
        self._known[name] = found, own
        return found, own


def _each(callbacks: list[Callable[..., Any]], *args: Any) -> None:
    for callback in callbacks:
        callback(*args)


def overrides(owner: Any, name: str, base: type) -> bool:
    """Whether `owner`, or its class, has a method `name` other than that of `base`."""
    return getattr(getattr(owner, name), "__func__", None) is not getattr(base, name)


def lean(trainer: pl.Trainer) -> bool:
    """Whether a step needs nothing that only Lightning's own loop does: a profiler, a loss scaler, a schedule that
    follows a metric, or a module with its own `optimizer_step`."""
    return (
        isinstance(trainer.profiler, PassThroughProfiler)  # type: ignore[attr-defined]
        and getattr(trainer.precision_plugin, "scaler", None) is None
        and not any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
        and not overrides(trainer.lightning_module, "optimizer_step", pl.LightningModule)
    )
