"""Run a program of a project as a command. This module imports next to nothing, so that a signal finds its handlers."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep import exit_on_signal

if TYPE_CHECKING:
    from lockstep.job.job import Job


def command(function: "Callable[[Job], Any]", file: str) -> NoReturn:
    """Run a program of a project as a command, and exit.

    It reads the arguments, composes and checks the config, opens the data, and starts the workers that the layout
    needs. Each of them calls `function(job)`. Until then a signal, such as that of Ctrl-C, ends it with one line.

    Args:
        function: `train`, `evaluate` or `predict`. Its name says what the program does.
        file: the program's own file, `__file__`.
    """
    exit_on_signal.install()
    from lockstep.commands import project_programs

    project_programs.run(function, file)
