"""What takes long and is the same in each process and test is done once. The server of forks.py does it ahead."""

import importlib
import pickle
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import omegaconf.base
import yaml

# Of each kind one override: their grammar is worked out when it is first met.
OVERRIDES = ("a=b", "a.b=1", "a=-0.5", "a=1e-3", "+a={b: 1, c: [x, y]}", "~a", "a=null", "a=b,c", "a='b c'", "a=/b/c.d")


def remember() -> None:
    """Let this process parse each text once: Hydra reads the same pages for each config that it composes."""
    yaml.load = _loads_once(yaml.load)
    omegaconf.base.parse = cache(omegaconf.base.parse)  # the same interpolations of each config


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


def do_ahead(libraries: Sequence[str], pages: Sequence[Path]) -> None:
    """Import libraries, and parse the pages of configs, for the processes that will be forks of this one."""
    for name in libraries:
        importlib.import_module(name)
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    remember()
    OverridesParser.create().parse_overrides([*OVERRIDES])
    for folder in pages:
        for page in folder.rglob("*.yaml"):
            OmegaConf.load(page)
