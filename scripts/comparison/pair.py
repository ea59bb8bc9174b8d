"""What differs between two runs: config, code, versions, machine, layout, data, and what came out, to the bits of the
weights. What is the same in both is named in one line, not listed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from yaml import YAMLError

from lockstep.arithmetic.layout import Refusal

ABSENT = "-"
OUTCOME = ("status", "error", "steps", "epochs", "samples_seen", "restarts", "metrics", "throughput", "weights_sha256")

Facts = dict[str, dict[str, Any]]  # section -> dotted key -> value


def facts(folder: Path) -> Facts:
    """What a run folder says about its run, by sections.

    Raises:
        Refusal: it is no run folder, or a file in it can't be read.
    """
    if not folder.is_dir():
        raise Refusal(f"{folder}: no such folder")
    summary, made = read(folder / "summary.json"), read(folder / "provenance.json")
    config = made.get("config") or read(folder / ".hydra" / "config.yaml")
    if not (summary or config):
        raise Refusal(f"{folder}: no run folder, it has neither summary.json nor .hydra/config.yaml")
    code = dict(made.get("git") or summary.get("git") or {})
    if (patch := folder / "git.diff").is_file():
        code["changes"] = hashlib.sha256(patch.read_bytes()).hexdigest()
    sections = {
        "config": config,
        "code": code,
        "versions": made.get("versions") or summary.get("versions"),
        "machine": made.get("machine"),
        "layout": summary.get("layout"),
        "data": {"fingerprint": made["data_fingerprint"]} if "data_fingerprint" in made else None,
        "outcome": {key: summary.get(key) for key in OUTCOME if key in summary},
    }
    return {name: dict(flat(section or {})) for name, section in sections.items()}


def flat(node: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, by dotted keys."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def differences(one: Facts, other: Facts) -> list[tuple[str, str, str, str]]:
    """Section, key, and the two values as they are shown, of everything that is not the same in both."""
    found = []
    for section, values in one.items():
        others = other[section]
        for key in [*values, *(key for key in others if key not in values)]:
            left, right = values.get(key, ABSENT), others.get(key, ABSENT)
            if left != right:
                found.append((section, key, show(left), show(right)))
    return found


def show(value: Any) -> str:
    """A value in a cell: digests cut, numbers short enough to be compared by eye."""
    if isinstance(value, str) and len(value) >= 40 and set(value) <= set("0123456789abcdef"):
        return value[:12]
    return "null" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def verdict(one: Facts, other: Facts) -> str:
    """The last line: what the weights say."""
    digests = [side["outcome"].get("weights_sha256") for side in (one, other)]
    if None in digests:
        return "weights: a run without an end has none to compare"
    return "weights: the same bits" if digests[0] == digests[1] else "weights: different bits"


def table(rows: list[tuple[str, str, str, str]], names: tuple[str, str]) -> Table:
    shown = Table("", "", box=box.SIMPLE_HEAD)
    for name in names:
        shown.add_column(Text(name), overflow="fold")
    for (section, *cells), before in zip(rows, [None, *rows], strict=False):
        first = before is None or before[0] != section
        shown.add_row(section if first else "", *map(Text, cells))
    return shown


def read(path: Path) -> dict[str, Any]:
    """A JSON or YAML file's mapping; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        text = path.read_text()
        found: Any = json.loads(text) if path.suffix == ".json" else OmegaConf.to_container(OmegaConf.create(text))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise Refusal(f"{path}: can't be read ({' '.join(str(error).split())[:120]})") from error
    if not isinstance(found, dict):
        raise Refusal(f"{path}: not a mapping")
    return found


def report(console: Console, folders: tuple[Path, Path]) -> None:
    """Prints the comparison.

    Raises:
        Refusal: as `facts`.
    """
    one, other = map(facts, folders)
    rows = differences(one, other)
    if rows:
        console.print(table(rows, (str(folders[0]), str(folders[1]))))
    same = [name for name in one if (one[name] or other[name]) and name not in {row[0] for row in rows}]
    unknown = [name for name in one if not (one[name] or other[name])]
    if same:
        console.print(f"the same in both: {', '.join(same)}")
    if unknown:
        console.print(f"neither tells: {', '.join(unknown)}")
    console.print(verdict(one, other))
