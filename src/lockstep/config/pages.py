"""The pages of the config: the project's in its conf/, and those that it inherits from lockstep and packages beside it.

A page of the project comes before the packages' of the same name. conf/train.yaml names the packages in
`hydra.searchpath`; for programs whose page does not, an override does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lockstep.project import LIBRARY, LIBRARY_PACKAGES, project

BASE = LIBRARY / "lockstep" / "conf" / "base.yaml"
INHERITED = [
    package / "conf" for package in LIBRARY_PACKAGES if (package / "conf").is_dir()
]  # Lockstep's are the first
SEARCHED = [f"pkg://{folder.parent.name}.conf" for folder in INHERITED]  # Hydra's names of them


def folders(added: Sequence[Path] = ()) -> list[Path]:
    """Return the folders that have pages, in the order in which Hydra looks for one: `added` has those in between."""
    return [project().conf, *added, *INHERITED]


def find(name: str, added: Sequence[Path] = ()) -> Path | None:
    """Return the file of a page such as `model/resnet18`; None if there is none.

    Args:
        name: the page, with its group.
        added: see `folders`.
    """
    files = (folder / f"{name}.yaml" for folder in folders(added))
    return next((file for file in files if file.is_file()), None)


def is_group(name: str) -> bool:
    """Return whether there are pages of a group."""
    return bool(name) and any((folder / name).is_dir() for folder in folders())


def options(group: str) -> list[str]:
    """Return the names of the pages of a group, without those whose names begin with an underscore."""
    return sorted({file.stem for folder in folders() for file in (folder / group).glob("[!_]*.yaml")})


def group_file(group: str, name: str) -> dict[str, Any]:
    """Return the content of a page, merged with the pages of its group in its `defaults`."""
    file = find(f"{group}/{name}")
    if file is None:
        raise FileNotFoundError(f"{group}/{name}.yaml")
    page: dict[str, Any] = yaml.safe_load(file.read_text()) or {}
    names = [base for base in page.pop("defaults", []) if isinstance(base, str)]  # a mapping chooses in another group
    bases = [group_file(group, base) for base in names if base != "_self_"]
    return {key: value for part in (*bases, page) for key, value in part.items()}


@dataclass(frozen=True)
class Primary:
    """The page with which Hydra begins to compose a program's config.

    Attributes:
        folder: the folder of the page.
        name: its name there.
        overrides: what must come before the overrides of the command line.
    """

    folder: Path
    name: str
    overrides: list[str]


def primary(program: str, more: Sequence[Path] = (), first: Sequence[str] = ()) -> Primary:
    """Return the page with which the config of a program begins.

    A page `program/<name>` adds keys to conf/train.yaml. One of `primary/` stands for itself, and so do a project's.

    Args:
        program: the name of the program, such as `train`.
        more: further folders with pages, which Hydra searches too.
        first: folders to search first, which Hydra does not know.
    """
    conf = project().conf
    if program == "train" or find(f"program/{program}", more):
        added = [f"+program={program}"] * (program != "train")
        return Primary(conf, "train", [*([search_path_override(first)] if first else []), *added])
    if (conf / f"{program}.yaml").is_file():
        return Primary(conf, program, [search_path_override(first)])
    page = next(folder / "primary" for folder in INHERITED if (folder / "primary" / f"{program}.yaml").is_file())
    return Primary(page, program, [search_path_override([*first, conf])])


def search_path_override(paths: Iterable[Path | str]) -> str:
    """Return the override that adds folders to those in which Hydra looks for pages, before the packages'."""
    return f"hydra.searchpath=[{','.join((*(quote_path(f'file://{path}') for path in paths), *SEARCHED))}]"


def with_one_search_path(overrides: Sequence[str]) -> list[str]:
    """Return overrides of which one says in which folders Hydra looks for pages, last in those of the packages.

    Hydra would take the first such override alone, in place of what conf/train.yaml says.

    Args:
        overrides: in the order in which their folders are searched.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser  # programs without a config need no Hydra

    paths: list[str] = []
    others = []
    for override in overrides:
        if override.partition("=")[0].lstrip("+") != "hydra.searchpath":
            others.append(override)
        else:
            value: Any = OverridesParser.create().parse_override(override).value()
            paths += map(str, value)
    if not paths:
        return others
    searched = [*dict.fromkeys(quote_path(path) for path in paths if path not in SEARCHED), *SEARCHED]
    return [f"hydra.searchpath=[{','.join(searched)}]", *others]


def quote_path(path: Path | str) -> str:
    """Return a path in quotes, as the value of an override. The path may have any characters."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(str(path), Quote.single).with_quotes()
