"""A run's folder that may be a stranger's: what it says when it goes on is not the user's own word."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep.arithmetic.layout import Refusal
from lockstep.run.checks import ROOT
from lockstep.run.targets import must_be_named


def must_hold_its_files(folder: Path) -> None:
    """Looks for links in a run's folder that lead out of it, before anything is written there.

    Raises:
        Refusal: there is one.
    """
    home = folder.resolve()
    for above, folders, files in os.walk(home):
        for path in (Path(above, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(home):
                raise Refusal(
                    f"{path}: a link that leads out of the run's folder, and the run would write there; put what it "
                    "stands for in its place, or move the whole folder"
                )


def must_be_harmless(
    file: Path,
    saved: Sequence[str],
    given: Sequence[str],
    folders: Sequence[Path],
    compose: Callable[[], Mapping[str, Any]],
) -> None:
    """Looks at the overrides that a run's folder recorded, before anything is made of them: they may name what the
    user's own config names, as a checkpoint may, and files of its groups.

    Args:
        file: that holds them.
        saved: those that are not given anew.
        given: on the command line, which may name anything.
        folders: that Hydra composes from besides conf/.
        compose: makes the config of all of them, resolved.

    Raises:
        Refusal: one sets something of Hydra's, chooses a file outside of its group, or names what is not known here.
    """
    for override in saved:
        name, _, value = override.partition("=")
        group = re.match(r"[+~]*([\w/]*)", name)
        outside = ".." in value or value.strip("'\"[ ").startswith("/")
        chooses = group is not None and any((base / group[1]).is_dir() for base in (ROOT / "conf", *folders))
        if "hydra" in name or (chooses and outside):
            raise Refusal(f"{file}: {override[:100]} is nothing that a run records; leave it out")
    if not any("_target_" in override or "$" in override or "@" in override for override in saved):
        return
    own = [OverridesParser.create().parse_override(override) for override in given if "_target_" in override]
    named = [{each.key_or_group.rpartition(".")[2]: each.value()} for each in own]
    for key, part in compose().items():
        must_be_named(file, key, part, named, folders)
