"""How a run ends: the exceptions that it raises, and the outcome that a worker sends to its parent."""

import os
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.launch.signals import Interrupted


class WorkerFailed(Exception):
    """A worker failed or died. The message names the rank and the reason in one line.

    Attributes:
        steps: completed optimizer steps, the largest count that a worker reported.
        local_rank: the worker's rank on its machine.
        victim: whether it failed only because another worker was lost, which reports the reason.
        without: suspected ranks: one of them computed wrong values, and none may continue.
        last_good_step: the last step that is known to be free of such values.
    """

    steps = 0
    local_rank = 0
    victim = False
    without: tuple[int, ...] = ()
    last_good_step = 0


@dataclass(frozen=True)
class Outcome:
    """How a worker ended."""

    # `completed`, `failed`, `refused` (bad input), `interrupted`, `victim` (another worker failed), or `waited`
    # (another worker hangs)
    kind: str
    text: str = ""  # the reason in one line; for a failed worker without its name, which the parent puts in front
    signum: int = 0  # the number of the signal that ended it
    steps: int = 0  # completed optimizer steps
    without: tuple[int, ...] = ()  # as in `WorkerFailed`
    last_good_step: int = 0  # as in `WorkerFailed`

    def raised(self) -> BaseException:
        """Return the exception that a run with this outcome raises."""
        if self.kind == "refused":
            return UserError(self.text)
        error: Any = Interrupted(self.signum) if self.kind == "interrupted" else WorkerFailed(self.text)
        error.steps, error.without, error.last_good_step = self.steps, self.without, self.last_good_step
        return error


def outcome_of(error: Interrupted | WorkerFailed) -> Outcome:
    """Return the outcome of a worker that an exception ended."""
    if isinstance(error, Interrupted):
        return Outcome("interrupted", str(error), error.signum, error.steps)
    return Outcome("failed", str(error), 0, error.steps, error.without, error.last_good_step)


def first_line(message: str) -> str:
    """Return the first line of a message.

    If torch has re-raised an error of another process or thread, the message contains a whole traceback. Then return
    the traceback's line with the exception.
    """
    if "\nOriginal Traceback (most recent call last):" in message:
        end = message.rpartition('\n  File "')[2].splitlines()[1:]
        raised_line = next((line for line in end if line and not line.startswith(" ")), message)
        message = re.sub(r"^[\w.]+\.(?=\w+: )", "", raised_line)
    return (message.strip().splitlines() or ["no reason given"])[0]


def user_code_location(trace: str) -> str:
    """Return the last frame of a traceback in the user's own code as `<file>:<line> in <function>; `, or ""."""
    frames = re.findall(r'^ *(?:\| +)?File "(.+)", line (\d+), in (.+)$', trace, re.MULTILINE)
    mine = [frame for frame in frames if _is_user_code(frame[0])]
    return f"{_format_frame(*mine[-1])}; " if mine else ""


def last_frame(stack: str) -> str:
    """Return the innermost frame of a stack that faulthandler wrote as `at <file>:<line> in <function>`.

    Prefer frames of the user's own code. Return "" if there is no stack.
    """
    threads = re.split(r"^.*\(most recent call first\):$", stack, flags=re.MULTILINE)[1:]  # the main thread is last
    trimmed = [re.split(r'^ *File ".+/launch/worker.py"', thread, flags=re.MULTILINE)[0] for thread in threads]
    calls = [re.findall(r'^ *File "(.+)", line (\d+) in (.+)$', thread, re.MULTILINE) for thread in trimmed]
    mine = [call for thread in calls for call in thread if _is_user_code(call[0])]
    latest = mine or (calls[-1] if calls else [])
    return f"at {_format_frame(*latest[0])}" if latest else ""


def _is_user_code(file: str) -> bool:
    """Check whether a file is neither Lockstep's, nor Python's, nor an installed package's."""
    others = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<")
    return not file.startswith(others) and not {"site-packages", "dist-packages"} & set(Path(file).parts)


def _format_frame(file: str, line: str, function: str) -> str:
    relative = os.path.relpath(file)
    return f"{file if relative.startswith('..') else relative}:{line} in {function}"
