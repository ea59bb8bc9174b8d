"""Let `breakpoint()` and other debuggers work in a worker: multiprocessing has taken its standard input away."""

import os
import sys
from typing import Any

from lockstep.errors import UserError, WorkerFailed


def allow(workers: int) -> None:
    """Let the user's code of this worker start a debugger, if it is the only one of its run.

    The worker then reads the command's own standard input. Several workers can't share one.
    """
    if workers == 1:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.breakpointhook is not sys.__breakpointhook__ or os.environ.get("PYTHONBREAKPOINT"):
        return  # the user's own choice of a debugger
    worker = os.getpid()

    def stop(*args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(1)
        place = f"breakpoint() in {os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
        if workers > 1:
            raise UserError(f"{place}: {workers} workers can't share a terminal: give devices=1 to debug")
        if os.getpid() != worker:
            raise UserError(f"{place}: a loader's process has no terminal: give num_workers=0 to debug")
        if sys.stderr.isatty():
            sys.stderr.write("\n\x1b[?25h")  # a new line, and the cursor, which a progress bar has hidden
            sys.stderr.flush()
        import pdb

        pdb.Pdb(nosigint=True).set_trace(frame)  # pdb's own handler would take Ctrl-C from the parent

    sys.breakpointhook = stop


def is_quit(error: BaseException) -> bool:
    """Check whether a debugger has raised an error: the user has quit it, or it could read nothing."""
    return type(error).__name__ == "BdbQuit"


def error_of_quit(workers: int) -> UserError | WorkerFailed:
    """Return the error of a run that has ended because a debugger was quit, or could read nothing."""
    if workers > 1:
        return UserError(f"a debugger has no input: {workers} workers can't share a terminal: give devices=1 to debug")
    if not os.isatty(0):
        return UserError("a debugger has read its input to the end: start the command in a terminal to debug")
    failed = WorkerFailed("the debugger was quit")
    failed.may_restart = False
    return failed
