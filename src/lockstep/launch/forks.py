"""Functions that are called in forks of this process, for their answers. The workers of a run: see parent.py."""

import os
import signal
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

from lockstep.errors import UserError, WorkerFailed
from lockstep.launch.signals import set_parent_death_signal

T = TypeVar("T")


def call_in_forks(*functions: Callable[[], T], seconds: float | None = None) -> list[T | Exception]:
    """Call each function in a fork of this process, all at the same time. The forks end with this call.

    multiprocessing would refuse to fork in a daemonic process.

    Args:
        functions: their results must be picklable.
        seconds: how long they may take; None: as long as they want.

    Returns:
        By function its result, or what it raised: a UserError or a WorkerFailed, which has the text of any other error.
        A TimeoutError if time is up, a WorkerFailed if the process has ended without an answer.
    """
    until = None if seconds is None else time.monotonic() + seconds
    forks: list[tuple[int, Connection]] = []
    try:
        for function in functions:
            forks.append(_start(function))
        return [_answer(receiver, until) for _, receiver in forks]
    finally:
        for child, receiver in forks:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            receiver.close()


def _start(function: Callable[[], object]) -> tuple[int, Connection]:
    """Return the process id of a new fork, and the connection at which its answer arrives."""
    receiver, sender = Pipe(duplex=False)
    parent, child = os.getpid(), os.fork()
    if not child:
        _call(function, sender, parent)
    sender.close()
    return child, receiver


def _call(function: Callable[[], object], sender: Connection, parent: int) -> NoReturn:
    """Call a function in this fork, and send what it returns or raises."""
    answer: object
    try:
        set_parent_death_signal(parent)
        answer = function()
    except (UserError, WorkerFailed) as error:
        answer = error
    except BaseException as error:
        answer = WorkerFailed(f"{type(error).__name__}: {error}")
    try:
        sender.send(answer)
    finally:
        os._exit(0)


def _answer(receiver: Connection, until: float | None) -> Any:
    try:
        if receiver.poll(None if until is None else max(0.0, until - time.monotonic())):
            return receiver.recv()
    except EOFError:
        return WorkerFailed("its process has ended")
    return TimeoutError()
