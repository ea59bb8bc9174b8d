"""Read what run folders record: config, code, versions, machine, layout, data and outcome."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lockstep.errors import UserError

ABSENT = "-"
NO_RUN = "it has neither summary.json nor .hydra/config.yaml"
OUTCOME = ("status", "error", "steps", "epochs", "samples_seen", "restarts", "metrics", "throughput", "weights_sha256")
DATA = {"fingerprint": "data_fingerprint", "shards": "data_content"}  # facts -> keys of provenance.json

Facts = dict[str, dict[str, Any]]  # section -> dotted key -> value


def facts(folder: Path) -> Facts:
    """Return the facts that a run folder records, by section.

    Raises:
        UserError: the folder is no run folder, or a file in it can't be read.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    summary, made = read(folder / "summary.json"), read(folder / "provenance.json")
    config = recorded_config(folder)
    if not (summary or config):
        raise UserError(f"{folder}: no run folder, {NO_RUN}")
    code = dict(made.get("git") or summary.get("git") or {})
    if (patch := folder / "git.diff").is_file():
        code["changes"] = hashlib.sha256(patch.read_bytes()).hexdigest()
    sections = {
        "config": config,
        "code": code,
        "versions": made.get("versions") or summary.get("versions"),
        "machine": made.get("machine"),
        "layout": summary.get("layout"),
        "data": {name: made[key] for name, key in DATA.items() if made.get(key)},
        "outcome": {key: summary.get(key) for key in OUTCOME if key in summary},
    }
    return {name: dict(flat(section or {})) for name, section in sections.items()}


def recorded_config(folder: Path) -> dict[str, Any]:
    """Return the config of a run: the resolved one, or what Hydra wrote if the run ended before it had recorded it."""
    return read(folder / "provenance.json").get("config") or read(folder / ".hydra" / "config.yaml")


def flat(node: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings with their dotted keys."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def differing_values(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the values of both runs for each key in which they differ."""
    pairs = {key: (one.get(key, ABSENT), other.get(key, ABSENT)) for key in {**one, **other}}
    if ABSENT in pairs.get("shards", ()):  # one run has read a folder, of which nobody knows the bytes
        del pairs["shards"]
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def show(value: Any) -> str:
    """Return a value as text for a cell: digests cut, numbers short enough to compare by eye."""
    if isinstance(value, str) and len(value) >= 40 and set(value) <= set("0123456789abcdef"):
        return value[:12]
    return "null" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def read(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file, with text that can be printed. Return an empty one without a file."""
    if not path.is_file():
        return {}
    try:
        text = path.read_text()
        content: Any = json.loads(text) if path.suffix == ".json" else OmegaConf.to_container(OmegaConf.create(text))
    except (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: can't be read ({' '.join(str(error).split())[:120]})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a mapping")
    printable: dict[str, Any] = _printable(content)
    return printable


def _printable(value: Any) -> Any:
    """Return a value with � in the place of what a terminal would obey, at any depth."""
    if isinstance(value, dict):
        return {_printable(key): _printable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_printable(part) for part in value]
    if isinstance(value, str):
        return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in value)
    return value
