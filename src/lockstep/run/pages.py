"""What the command line tells of conf/: its pages of help, and what is near a name that is not there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from lockstep.arithmetic.layout import Refusal
from lockstep.run.checks import ROOT, options, unknown

CONF = ROOT / "conf"
# What else a user who finds nothing of this name can do.
OWN = dict.fromkeys(("model", "data", "callbacks", "logger"), "; one of your own: docs/own.md") | dict.fromkeys(
    ("optimizer", "scheduler"), "; any other: docs/own.md"
)


def page(config_name: str, overrides: Sequence[str], folders: Sequence[Path]) -> str:
    """The help of a program: the files of the groups that a command line chooses in `folders`, or the front page."""
    chosen = [
        f"{group}={name}\n\n{_file(group, name, folders).read_text().strip()}" for group, name in _chosen(overrides)
    ]
    return "\n\n".join(chosen) or front_page(config_name)


def front_page(config_name: str) -> str:
    """How to call a program, what each group offers, and the front page of conf/ itself, with its comments."""
    text = (CONF / f"{config_name}.yaml").read_text()
    usage, _, keys = text.partition("defaults:\n")
    keys = keys[keys.index("\n\n") :].strip()
    groups = []
    for folder in sorted(path for path in CONF.iterdir() if path.is_dir() and path.name != "hydra"):
        if f"- {folder.name}:" in text:
            groups.append(f"{folder.name}=")
            groups += [f"  {file.stem:<16} {_purpose(file)}" for file in sorted(folder.glob("*.yaml"))]
    notes = (
        "More: <group>=<name> --help shows that file's keys, -m sweeps over comma-separated values, --cfg job prints "
        "the config, --hydra-help has Hydra's flags."
    )
    return "\n\n".join([usage.replace("# ", "").strip(), "GROUPS", "\n".join(groups), "KEYS", keys, notes])


def no_option(group: str, name: str) -> str:
    """That a group has no file of this name, and which it has."""
    return f"{group}={name}: {unknown(name, options(group))}{OWN.get(group, '')}"


def no_key(key: str, config_name: str, error: Any) -> str:
    """That there is no such key, where its name is known, and what is near it: where OmegaConf missed it (`error`), or
    on the front page."""
    *groups, name = key.split(".")
    front = _keys(CONF / f"{config_name}.yaml")
    if key in front:  # a group of which the front page chooses nothing
        return f"{key}: there is no such key; +{key}=<name> adds it"
    files = sorted((CONF / groups[0]).glob("*.yaml")) if groups else []
    if having := [file.stem for file in files if name in _keys(file, *groups[1:])]:
        return f"{key}: there is no such key; {groups[0]}={' or '.join(having)} has it"
    beside = error.parent_node if groups and getattr(error, "full_key", None) == key else ()
    known = sorted({str(found) for found in beside} - {"_target_"})
    return f"{key}: there is no such key; {unknown(name, front if name in front or not known else known)}"


def _chosen(overrides: Iterable[str]) -> list[tuple[str, str]]:
    chosen = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        group = override.key_or_group
        if (CONF / group).is_dir() and not override.is_delete():
            names = list(override.sweep_string_iterator()) if override.is_sweep_override() else override.value()
            chosen += [(group, str(name)) for name in (names if isinstance(names, list) else [names])]
    return chosen


def _file(group: str, name: str, folders: Iterable[Path]) -> Path:
    for folder in folders:
        if (file := folder / group / f"{name}.yaml").is_file():
            return file
    raise Refusal(no_option(group, name))


def _purpose(file: Path) -> str:
    comments = (line.removeprefix("#").strip() for line in file.read_text().splitlines() if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@")), "")


def _keys(file: Path, *groups: str) -> list[str]:
    """The keys of a config file, or of a group inside it; at the top level also the groups that it composes."""
    node: Any = OmegaConf.to_container(OmegaConf.load(file))
    found: set[str] = set()
    if not groups:
        found = {group for entry in node.pop("defaults", []) if isinstance(entry, dict) for group in entry}
    for group in groups:
        node = node.get(group) if isinstance(node, dict) else None
    return sorted((found | set(node or ())) - {"hydra", "_target_"})
