"""Read the keys of yaml files with their comments."""

import re
from collections.abc import Iterator

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
