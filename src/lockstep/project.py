"""The project whose programs run: the folder that a user owns, with `conf/`, `src/` and `outputs/`."""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lockstep.errors import UserError

VARIABLE = "LOCKSTEP_PROJECT"  # tells the processes that a command starts


@dataclass(frozen=True)
class Project:
    """A project's folders.

    Attributes:
        root: the folder of the project.
    """

    root: Path

    @property
    def conf(self) -> Path:
        """The config files."""
        return self.root / "conf"

    @property
    def source(self) -> Path:
        """The user's code and programs."""
        return self.root / "src"

    @property
    def train_program(self) -> Path:
        """The program that trains."""
        return self.source / "train.py"


def use_project_of(path: Path | str) -> None:
    """Make the project of a file or folder the one of this process and of the processes that it starts.

    Raises:
        UserError: neither the path nor a folder above it is a project.
    """
    os.environ[VARIABLE] = str(_find(Path(path).resolve()))
    project.cache_clear()


@cache
def project() -> Project:
    """Return the project of this process: that of the command, else the nearest one above the working folder.

    Raises:
        UserError: the working folder is in no project.
    """
    if root := os.environ.get(VARIABLE):
        return Project(Path(root))
    return Project(_find(Path.cwd()))


def _find(path: Path) -> Path:
    for parent in (path, *path.parents):
        if (parent / "conf" / "train.yaml").is_file():
            return parent
    raise UserError(f"{path} is in no project: the project's folder has conf/train.yaml")
