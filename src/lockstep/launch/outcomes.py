"""The exception of a failed worker, and the reason in one line from tracebacks and stacks."""

import os
import re
import sysconfig
from pathlib import Path
from typing import Any


class WorkerFailed(Exception):
    """A worker failed or died. The message names the rank and the reason in one line.

    Args:
        message: the message.
        facts: the values of attributes, by name.

    Attributes:
        steps: completed optimizer steps, the largest count that a worker reported.
        local_rank: the worker's rank on its machine.
        signum: the number of the signal that killed it; 0 if none did.
        waited: whether it failed only because another worker did not join a collective.
        victim: whether it failed only because another worker was lost, which reports the reason.
        suspects: ranks of which one computed wrong values; none of them may continue.
        last_good_step: the last step that is known to be free of such values.
    """

    steps = 0
    local_rank = 0
    signum = 0
    waited = False
    victim = False
    suspects: tuple[int, ...] = ()
    last_good_step = 0

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        vars(self).update(facts)


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
