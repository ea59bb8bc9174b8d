"""What Hydra 1.3 and Hydra 1.4 want said differently. Python 3.14 needs 1.4, which is a release candidate."""

from collections.abc import Callable
from typing import Any

import hydra
from omegaconf import OmegaConf

IS_1_3 = hydra.__version__.startswith("1.3.")
# For `hydra.main` and the like: Hydra 1.3 warns without this argument, Hydra 1.4 warns about it.
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if IS_1_3 else {}


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Register an OmegaConf resolver whose results a config caches. OmegaConf 2.4, of Hydra 1.4, renamed the method."""
    register: Any = OmegaConf.register_new_resolver if IS_1_3 else OmegaConf.register_resolver
    register(name, resolver, use_cache=True, replace=True)
