"""The project whose programs run: the folder that a user owns, with `conf/`, `src/` and `outputs/`."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.errors import UserError

VARIABLE = "LOCKSTEP_PROJECT"  # tells the processes that a command starts
LIBRARY = Path(__file__).parents[1]  # the folder in which Lockstep lies
LIBRARY_PACKAGES = sorted(
    file.parent for file in LIBRARY.glob("lockstep*/__init__.py")
)  # Lockstep, and packages beside it


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

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function `name(job)` of the program `src/<name>.py`.

        Raises:
            UserError: the program has no such function.
        """
        return _function(self.source / f"{name}.py")


def use_project_of(path: Path | str) -> None:
    """Make the project of a file or folder the one of this process and of the processes that it starts.

    Raises:
        UserError: neither the path nor a folder above it is a project.
    """
    os.environ[VARIABLE] = str(_find(Path(path).resolve()))
    project.cache_clear()


@cache
def project() -> Project:
    """Return the project of this process.

    It is that of the command, else the nearest one above the working folder, else the one that is installed in this
    environment by `pip install -e`, whose `src/` is then in Python's import path. A folder in the `outputs/` of another
    project is none: a run may come from somebody else, with pages and code in its folder.

    Raises:
        UserError: there is none.
    """
    if root := os.environ.get(VARIABLE):
        return Project(Path(root))
    installed = [Path(folder).parent for folder in sys.path if Path(folder).name == "src"]
    here = Path.cwd()
    outer = [folder for folder in here.parents if _is_project(folder)]
    while any(here.is_relative_to(folder / "outputs") for folder in outer):
        here = here.parent
    return Project(_find(here, installed))


def _is_project(folder: Path) -> bool:
    return (folder / "conf" / "train.yaml").is_file()


@cache
def _function(program: Path) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(f"_{program.stem}_program", program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Any = getattr(module, program.stem, None)
    if not callable(function):
        raise UserError(f"{program}: it has no function {program.stem}: it must define {program.stem}(job)")
    return function


def _find(path: Path, installed: Iterable[Path] = ()) -> Path:
    for folder in (path, *path.parents, *installed):
        if _is_project(folder):
            return folder
    raise UserError(f"{path} is in no project: the project's folder has conf/train.yaml")
