"""Hooks of callbacks and of the module: called as Lightning calls them, in less time."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import call


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


def current_hook(module: Any) -> str:
    """Return the name of a LightningModule's or callback's hook that runs, or "" outside of hooks."""
    return getattr(module, "_current_fx_name", None) or ""


def overrides_method(owner: Any, name: str, base: type) -> bool:
    """Check whether `owner`, or its class, overrides the method `name` of `base`."""
    return getattr(getattr(owner, name), "__func__", None) is not getattr(base, name)


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
