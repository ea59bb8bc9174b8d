"""What the command line tells of conf/: its pages of help, and what is near a name that is not there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.arithmetic.layout import Refusal
from lockstep.run.checks import ROOT, options, unknown

CONF = ROOT / "conf"


def page(config_name: str, overrides: Sequence[str], folders: Sequence[Path]) -> str:
    """The help of a program: the files of the groups that a command line chooses in `folders`, or the front page."""
    chosen = []
    for override in overrides:
        group, _, names = override.partition("=")
        for name in names.strip("[]").split(",") if (CONF / group).is_dir() else ():
            files = [file for folder in folders if (file := folder / group / f"{name}.yaml").is_file()]
            if not files:
                raise Refusal(no_option(group, name))
            chosen.append(f"{group}={name}\n\n{files[0].read_text().strip()}")
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
    return f"{group}={name}: {unknown(name, options(group))}"


def no_key(key: str, error: Any) -> str:
    """That there is no such key, and what is near it where OmegaConf missed it (`error`)."""
    if error is None:  # a group of which the front page chooses nothing
        return f"{key}: there is no such key; +{key}=<name> adds it"
    beside = {str(name) for name in error.parent_node or ()} - {"_target_"}
    return f"{key}: there is no such key; {unknown(key.rpartition('.')[2], beside)}"


def _purpose(file: Path) -> str:
    """The first comment of a config file that is none of Hydra's."""
    comments = (line.removeprefix("#").strip() for line in file.read_text().splitlines() if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@")), "")
