"""`scipy.signal` is imported when something of it is used.

Importing Lightning imports torchmetrics, which imports scipy.signal only to give it a `hamming`, for the sake of an
audio package, where it has none. That takes 0.6 s, a fifth of a run's start. So a command puts a module in its place
that has this one name, and becomes the real one when it is asked for another, by the user's own code, say.
"""

from __future__ import annotations

import sys
import threading
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

NAME = "scipy.signal"
_lock = threading.RLock()
_running = False


class _Later(ModuleType):
    def __getattr__(self, name: str) -> Any:  # called for what it lacks
        global _running
        with _lock:  # other threads wait here; this one comes again while the module runs
            if _running:
                raise AttributeError(f"module {NAME!r} has no attribute {name!r}")
            if type(self) is _Later:
                _running = True
                try:
                    vars(self).pop("hamming", None)
                    self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
                finally:
                    _running = False
                self.__class__ = ModuleType  # type: ignore[assignment]
                self.hamming = self.windows.hamming  # what torchmetrics would have done
        return getattr(self, name)


def _hamming(*args: Any, **options: Any) -> Any:
    return sys.modules[NAME].windows.hamming(*args, **options)


def import_later() -> None:
    """Puts it in place, unless scipy.signal is imported already or there is none."""
    if NAME in sys.modules or find_spec("scipy") is None or (spec := find_spec(NAME)) is None:
        return
    module = module_from_spec(spec)
    module.__class__ = _Later
    vars(module)["hamming"] = _hamming
    sys.modules[NAME] = module
