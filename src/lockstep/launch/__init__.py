"""Processes: the environment of torchrun, SLURM or MPI; workers, signals, logs. `lockstep.launch(...)` starts some."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """This package, which is also the function `lockstep.launch`: Python gives both the same name."""

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        from lockstep.launch.local import launch

        return launch(function, *args, **options)


sys.modules[__name__].__class__ = _CallablePackage
