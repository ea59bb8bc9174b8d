"""How Hydra is called: its private names, and what Hydra 1.3 and 1.4 want said differently.

Python 3.14 needs Hydra 1.4, which is a release candidate.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra

# Hydra has no public name for these: its sweeper, and the parser of its flags. `hydra_plugins` has private names of its
# own: each program with Hydra imports it, and must not import Lockstep by that.
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper as BasicSweeper
from hydra._internal.utils import get_args_parser as get_args_parser
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

IS_1_3 = hydra.__version__.startswith("1.3.")
# For `hydra.main` and the like: Hydra 1.3 warns without this argument, Hydra 1.4 warns about it.
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if IS_1_3 else {}


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Register an OmegaConf resolver whose results a config caches. OmegaConf 2.4, of Hydra 1.4, renamed the method."""
    register: Any = OmegaConf.register_new_resolver if IS_1_3 else OmegaConf.register_resolver
    register(name, resolver, use_cache=True, replace=True)


def run_hydra(function: Callable[[DictConfig], None], arguments: Sequence[str], folder: Path, page: str) -> None:
    """Compose a config and call a function with it, once or for each job of a sweep.

    Args:
        function: gets the config.
        arguments: overrides and Hydra's flags.
        folder: the folder of the config's first page.
        page: the name of that page.
    """
    typed = sys.argv[:]

    def call(config: DictConfig) -> None:
        sys.argv[:] = typed
        function(config)

    # `hydra.main` has no parameter for the arguments. It reads `sys.argv`, before it calls the function.
    sys.argv[1:] = arguments
    try:
        hydra.main(**VERSION_BASE, config_path=str(folder), config_name=page)(call)()
    finally:
        sys.argv[:] = typed


@contextmanager
def without_outer_hydra() -> Iterator[None]:
    """Inside the `with` block, set the state of an outer `hydra.main` aside, with which Hydra refuses to start."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().hydra = None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer


def whole_config(error: Any) -> dict[str, Any]:
    """Return the config in which an error of OmegaConf was raised, as plain containers."""
    config: Any = OmegaConf.to_container(error.parent_node._get_root())
    return dict(config)
