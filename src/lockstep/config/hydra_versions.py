"""What Hydra 1.3 and Hydra 1.4 want said differently. Python 3.14 needs 1.4, which is a release candidate."""

from collections.abc import Callable
from typing import Any

import hydra
from omegaconf import OmegaConf

# `hydra.main(**VERSION_BASE, ...)`: Hydra 1.3 warns without this argument, Hydra 1.4 warns about it.
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Register an OmegaConf resolver that is called once for each config and its arguments."""
    # OmegaConf 2.4, which comes with Hydra 1.4, has the first one and warns about the second.
    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    register(name, resolver, use_cache=True, replace=True)
