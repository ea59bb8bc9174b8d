"""Compare the keys of configs."""

from collections.abc import Mapping, Sequence
from typing import Any


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the dotted keys in which configs differ.

    Where configs chose different files of a group, `optimizer.name` shows it. Keys that only one of
    the files has are then left out.
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    differ = [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]
    chosen = {key.rpartition(".")[0] for key in differ if key.endswith(".name")}
    return [key for key in differ if key.partition(".")[0] not in chosen or all(key in config for config in configs)]
