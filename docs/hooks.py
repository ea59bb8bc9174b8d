"""Functions that mkdocs calls while it builds the site: pages of extras may have been deleted with their extra."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Sections whose pages are found in a folder, in the order of their titles.
FOLDERS = {"Extras": "extras"}


def on_config(config: Any) -> Any:
    """Leave out pages of the navigation whose extra was deleted; add pages of FOLDERS that it does not list."""
    docs = Path(config["docs_dir"])
    config["nav"] = [entry for entry in (_existing(entry, docs) for entry in config["nav"]) if entry is not None]
    listed = set(_pages(config["nav"]))
    for title, entries in _sections(config["nav"]):
        if title in FOLDERS:
            folder = docs / FOLDERS[title]
            names = {f"{FOLDERS[title]}/{path.name}" for path in folder.glob("*.md") if path.name != "index.md"}
            entries += sorted(names - listed)
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Link the pages of extras. Their table can't link by itself, since an extra's page goes with the extra."""
    if page.file.src_uri != "extras.md":
        return markdown
    names = "|".join(path.stem for path in Path(config["docs_dir"], "extras").glob("*.md"))
    return re.sub(rf"^\| ({names}) \|", r"| [\1](extras/\1.md) |", markdown, flags=re.MULTILINE)


def _existing(entry: Any, docs: Path) -> Any:
    """Return an entry of the navigation without pages in extras/ that are not there; None where nothing is left."""
    if isinstance(entry, str):
        return None if entry.startswith("extras/") and not (docs / entry).exists() else entry
    ((title, inside),) = entry.items()
    if isinstance(inside, list):
        left = [each for each in (_existing(each, docs) for each in inside) if each is not None]
    else:
        left = _existing(inside, docs)
    return {title: left} if left else None


def _pages(nav: list[Any]) -> Iterator[str]:
    """Yield every page of a navigation."""
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            (inside,) = entry.values()
            yield from _pages(inside if isinstance(inside, list) else [inside])


def _sections(nav: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield title and entries of every section of a navigation."""
    for entry in nav:
        if isinstance(entry, dict):
            ((title, inside),) = entry.items()
            if isinstance(inside, list):
                yield title, inside
                yield from _sections(inside)
