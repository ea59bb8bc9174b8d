"""Read the keys of yaml files with their comments, and compare the keys of configs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

KEY = re.compile(r"^(?P<indent> *)(?P<dash>- )?(?P<key>[\w./]+):(?: (?P<value>.*?))?(?: *# (?P<comment>.*))?$")


def rows(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield key, default and comment of each key of a yaml file; nested keys with dots. A list's items are left out."""
    parents: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = KEY.match(line)
        if not match or match["dash"]:
            continue
        indent = len(match["indent"])
        parents = [(depth, key) for depth, key in parents if depth < indent]
        path = ".".join([*(key for _, key in parents), match["key"]])
        parents.append((indent, match["key"]))
        if match["key"] != "defaults":
            yield path, match["value"] or "", match["comment"] or ""


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the dotted keys in which configs differ.

    Where configs chose different files of a group, `optimizer.name` shows it. Keys that only one of
    the files has are then left out.
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    differ = [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]
    chosen = {key.rpartition(".")[0] for key in differ if key.endswith(".name")}
    return [key for key in differ if key.partition(".")[0] not in chosen or all(key in config for config in configs)]
