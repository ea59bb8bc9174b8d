"""How a run ends, as what is raised, and as what is told to a worker's parent and to other machines."""

import os
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.signals import Interrupted


class WorkerFailed(Exception):
    """A worker died. The message names the rank and the reason in one line."""

    steps = 0  # as in `Interrupted`
    local_rank = -1  # of the worker; -1: of another machine's
    victim = False  # whether it failed because it lost another one, which has the reason
    without: tuple[int, ...] = ()  # ranks one of which computed wrong: the run can't go on with it
    right = 0  # steps of the last checkpoint that it has not spoilt, as far as is known


@dataclass(frozen=True)
class Outcome:
    """How a worker ended, a machine's workers, or the whole run."""

    kind: str  # `completed`, `failed`, `refused`, `interrupted`; or `victim`, which failed because others did
    text: str = ""  # the reason in one line; of a worker's failure what follows its name
    signum: int = 0  # of the signal that ended it
    steps: int = 0  # optimizer steps that had been made
    without: tuple[int, ...] = ()  # as in `WorkerFailed`
    right: int = 0

    def raised(self) -> BaseException:
        """What a run that ends like this raises."""
        if self.kind == "refused":
            return Refusal(self.text)
        error: Any = Interrupted(self.signum) if self.kind == "interrupted" else WorkerFailed(self.text)
        error.steps, error.victim = self.steps, self.kind == "victim"
        error.without, error.right = self.without, self.right
        return error


def outcome_of(error: BaseException | None) -> Outcome:
    """How what was raised, if anything, ended a machine's workers."""
    if error is None:
        return Outcome("completed")
    if isinstance(error, Refusal):
        return Outcome("refused", str(error))
    steps = getattr(error, "steps", 0)
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return Outcome("interrupted", str(error), getattr(error, "code", 130) - 128, steps)
    kind = "victim" if getattr(error, "victim", False) else "failed"
    return Outcome(kind, str(error), 0, steps, getattr(error, "without", ()), getattr(error, "right", 0))


def own_words(message: str) -> str:
    """The first line of a message; of what torch hands on from another process or thread, which holds the whole
    traceback from there, the line that says what was raised."""
    if "\nOriginal Traceback (most recent call last):" in message:
        end = message.rpartition('\n  File "')[2].splitlines()[1:]
        found = next((line for line in end if line and not line.startswith(" ")), message)
        message = re.sub(r"^[\w.]+\.(?=\w+: )", "", found)
    return (message.strip().splitlines() or ["no reason given"])[0]


def users_line(trace: str) -> str:
    """Where in the user's own code a traceback ends: `<file>:<line> in <function>; `, or nothing."""
    others = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<")
    found = [
        (file, line, function)
        for file, line, function in re.findall(r'^ *(?:\| +)?File "(.+)", line (\d+), in (.+)$', trace, re.MULTILINE)
        if not file.startswith(others) and not {"site-packages", "dist-packages"} & set(Path(file).parts)
    ]
    if not found:
        return ""
    file, line, function = found[-1]
    near = os.path.relpath(file)
    return f"{file if near.startswith('..') else near}:{line} in {function}; "
