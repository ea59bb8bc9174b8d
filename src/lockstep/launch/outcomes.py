"""How a run ends, as what is raised, and as what a worker sends to its parent."""

import os
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.launch.signals import Interrupted


class WorkerFailed(Exception):
    """A worker died. The message names the rank and the reason in one line."""

    steps = 0  # optimizer steps that the workers had made, as far as one of them said so
    local_rank = 0  # of the worker
    victim = False  # whether it failed because it lost another one, which has the reason
    without: tuple[int, ...] = ()  # ranks one of which computed wrong: the run can't go on with it
    last_good_step = 0  # steps of the last checkpoint that it has not spoilt, as far as is known


@dataclass(frozen=True)
class Outcome:
    """How a worker ended."""

    kind: str  # `completed`, `failed`, `refused`, `interrupted`; `victim`: others failed; `waited`: for one that hangs
    text: str = ""  # the reason in one line; of a worker's failure what follows its name
    signum: int = 0  # of the signal that ended it
    steps: int = 0  # optimizer steps that had been made
    without: tuple[int, ...] = ()  # as in `WorkerFailed`
    last_good_step: int = 0

    def raised(self) -> BaseException:
        """What a run that ends like this raises."""
        if self.kind == "refused":
            return UserError(self.text)
        error: Any = Interrupted(self.signum) if self.kind == "interrupted" else WorkerFailed(self.text)
        error.steps, error.without, error.last_good_step = self.steps, self.without, self.last_good_step
        return error


def outcome_of(error: Interrupted | WorkerFailed) -> Outcome:
    """How what was raised in a worker ended it."""
    if isinstance(error, Interrupted):
        return Outcome("interrupted", str(error), error.signum, error.steps)
    return Outcome("failed", str(error), 0, error.steps, error.without, error.last_good_step)


def first_line(message: str) -> str:
    """The first line of a message; of what torch hands on from another process or thread, which holds the whole
    traceback from there, the line that says what was raised."""
    if "\nOriginal Traceback (most recent call last):" in message:
        end = message.rpartition('\n  File "')[2].splitlines()[1:]
        raised_line = next((line for line in end if line and not line.startswith(" ")), message)
        message = re.sub(r"^[\w.]+\.(?=\w+: )", "", raised_line)
    return (message.strip().splitlines() or ["no reason given"])[0]


def user_code_location(trace: str) -> str:
    """Where in the user's own code a traceback ends: `<file>:<line> in <function>; `, or nothing."""
    frames = re.findall(r'^ *(?:\| +)?File "(.+)", line (\d+), in (.+)$', trace, re.MULTILINE)
    mine = [frame for frame in frames if _is_users(frame[0])]
    return f"{_shown(*mine[-1])}; " if mine else ""


def last_frame(stack: str) -> str:
    """Where a process was whose stack faulthandler has written: in the user's own code, if it was there; else in the
    function that it was in. Empty without a stack."""
    threads = re.split(r"^.*\(most recent call first\):$", stack, flags=re.MULTILINE)[1:]  # the main one comes last
    trimmed = [re.split(r'^ *File ".+/launch/worker.py"', thread, flags=re.MULTILINE)[0] for thread in threads]
    calls = [re.findall(r'^ *File "(.+)", line (\d+) in (.+)$', thread, re.MULTILINE) for thread in trimmed]
    mine = [call for thread in calls for call in thread if _is_users(call[0])]
    latest = mine or (calls[-1] if calls else [])
    return f"at {_shown(*latest[0])}" if latest else ""


def _is_users(file: str) -> bool:
    others = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<")
    return not file.startswith(others) and not {"site-packages", "dist-packages"} & set(Path(file).parts)


def _shown(file: str, line: str, function: str) -> str:
    near = os.path.relpath(file)
    return f"{file if near.startswith('..') else near}:{line} in {function}"
