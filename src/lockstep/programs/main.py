"""The command `lockstep`: run one of the programs of this package.

Each module of the package, but this one, is a command, such as `lockstep fit-memory`; so are those of a package
`programs` beside Lockstep, as in lockstep_extras. Its docstring begins with the line that `lockstep --help` prints, and
its `main` gets the command's arguments and returns the exit code.
"""

import ast
import difflib
import importlib
import os
import pkgutil
import sys
from contextlib import suppress
from importlib import metadata
from typing import NoReturn

from lockstep import exit_on_signal
from lockstep.errors import UserError
from lockstep.launch.signals import Interrupted
from lockstep.programs.common.packages import check_packages
from lockstep.project import LIBRARY, LIBRARY_PACKAGES, VARIABLE, project


def commands() -> dict[str, str]:
    """Return the names of all commands, with their modules' names."""
    modules: dict[str, str] = {}
    for package in LIBRARY_PACKAGES:
        programs = pkgutil.iter_modules([str(package / "programs")])
        names = [each.name for each in programs if not each.ispkg and each.name != "main"]
        modules |= {name.replace("_", "-"): f"{package.name}.programs.{name}" for name in names}
    return dict(sorted(modules.items()))


def summary(module: str) -> str:
    """Return the first line of a module's docstring, without importing the module."""
    docstring = ast.get_docstring(ast.parse(LIBRARY.joinpath(*module.split(".")).with_suffix(".py").read_text())) or ""
    return docstring.partition("\n")[0].rstrip(":.")


def help_text() -> str:
    """Return the list of the commands."""
    known = commands()
    width = max(map(len, known))
    lines = (f"  {name:{width}}  {summary(module)}" for name, module in known.items())
    return "\n".join(
        ["usage: lockstep <command> ...", "", *lines, "", "`lockstep <command> --help` describes one of them."]
    )


def main() -> NoReturn:
    """Run the command that the arguments name, and exit with its exit code."""
    exit_on_signal.install()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(help_text())
        sys.exit(0)
    if name in ("-V", "--version"):
        print(f"lockstep {metadata.version('pytorch-lockstep')}")
        sys.exit(0)
    os.environ.pop(VARIABLE, None)  # it is for the processes that a command starts
    try:
        code = run(name, arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except OSError as error:
        if not error.filename:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        code = 2
    except (Interrupted, KeyboardInterrupt) as interrupted:
        print(str(interrupted) or "interrupted by SIGINT", file=sys.stderr)
        code = getattr(interrupted, "code", 130)
    sys.exit(code)


def run(name: str, arguments: list[str]) -> int:
    """Run a command. Return its exit code.

    Raises:
        UserError: there is no such command, or the command refuses its arguments.
    """
    known = commands()
    if name not in known:
        near = difflib.get_close_matches(name.replace("_", "-"), known, 1)
        nearest = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise UserError(f"lockstep {name}: no such command: {nearest}")
    with suppress(UserError):  # a command that needs a project refuses to run without one
        sys.path.insert(0, str(project().source))  # the user's code
    sys.argv[:] = [f"lockstep {name}", *arguments]
    if not {"--help", "-h"} & set(arguments):
        check_packages(*arguments)
    module = importlib.import_module(known[name])
    code: int = module.main(arguments)
    return code
