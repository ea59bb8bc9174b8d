"""What takes long and is the same in each process and test is done once. The server of forks.py does it ahead."""

import importlib
import importlib.metadata
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import omegaconf.base
import yaml

# Of each kind one override: their grammar is worked out when it is first met.
OVERRIDES = ("a=b", "a.b=1", "a=-0.5", "a=1e-3", "+a={b: 1, c: [x, y]}", "~a", "a=null", "a=b,c", "a='b c'", "a=/b/c.d")


def remember() -> None:
    """Let this process parse each text once, and read what is said about the installed packages once.

    Hydra reads the same pages for each config that it composes, and each Trainer the entry points of all packages.
    """
    yaml.load = _loads_once(yaml.load)
    omegaconf.base.parse = cache(omegaconf.base.parse)  # the same interpolations of each config
    metadata: Any = importlib.metadata
    metadata.entry_points, metadata.version = cache(metadata.entry_points), cache(metadata.version)


def _loads_once(load: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return `yaml.load` with a memory, by the text."""
    contents: dict[tuple[Any, str], bytes] = {}

    def loads(stream: Any, Loader: Any) -> Any:  # noqa: N803 # the name of PyYAML
        is_file = hasattr(stream, "seek")
        key = stream.read() if is_file else stream, Loader.__name__
        if key not in contents:
            if is_file:
                stream.seek(0)  # an error names the file
            contents[key] = pickle.dumps(load(stream, Loader))
        return pickle.loads(contents[key])

    return loads


def _composes_once(compose: Callable[..., Any]) -> Callable[..., Any]:
    """Return Hydra's method that composes a config. It keeps that which is composed to learn whether to run a sweep.

    Hydra composes a program's config for `hydra.mode` alone, adds `hydra.mode=RUN` to the overrides, and composes the
    same again.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.types import RunMode

    def composes(self: Any, **options: Any) -> Any:
        composed = vars(self).pop("composed", None)
        name, overrides = options["config_name"], options["overrides"]
        if not options.get("validate_sweep_overrides", True):  # for the mode
            with suppress(Exception):  # then as Hydra does: a sweep may lack a choice, and an error comes again
                config = compose(self, **options | {"run_mode": RunMode.RUN})
                self.composed = (name, [*overrides, "hydra.mode=RUN"], config)
                return config
        elif composed and composed[:2] == (name, overrides):
            parsed = OverridesParser.create().parse_overrides(overrides)
            self.validate_sweep_overrides_legal(parsed, RunMode.RUN, options.get("from_shell", True))
            config = composed[-1]
            config.hydra.mode = RunMode.RUN
            config.hydra.overrides.hydra.append(overrides[-1])
            return config
        return compose(self, **options)

    return composes


def do_ahead(libraries: Sequence[str], pages: Sequence[Path]) -> None:
    """Import libraries, and parse the pages of configs, for the processes that will be forks of this one."""
    remember()  # before libraries take the names of these functions
    for name in libraries:
        importlib.import_module(name)
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    loader: Any = ConfigLoaderImpl
    loader.load_configuration = _composes_once(loader.load_configuration)
    OverridesParser.create().parse_overrides([*OVERRIDES])
    for folder in pages:
        for page in folder.rglob("*.yaml"):
            OmegaConf.load(page)
