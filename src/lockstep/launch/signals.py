"""Signals of a run: the parent passes them on, a worker remembers them until an optimizer step is done. No process
outlives the one that it works for."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class Interrupted(BaseException):
    """The run was asked to end by a signal, and did. Not an `Exception`: it ends a sweep, not only its job."""

    steps = 0  # optimizer steps that the workers had made, where there were any

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.code = 128 + signum


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal was closed, or ssh lost
PASSED_ON = (*ENDING, signal.SIGUSR1)
pending_signals: list[int] = []  # the signals that this worker was sent so far


def record_signal(signum: int, frame: FrameType | None) -> None:
    """A worker's signal handler. It only remembers: a collective in a handler would meet other ranks in another one."""
    pending_signals.append(signum)


def ignores_hangup(signum: int = signal.SIGHUP) -> bool:
    """Whether this is SIGHUP, and the process ignores it."""
    return signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None], *signals: int) -> Iterator[None]:
    """While it lasts, signals are this handler's. SIGHUP stays ignored where it is: under nohup."""
    before = {number: signal.signal(number, handler) for number in signals if not ignores_hangup(number)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def forwarding() -> Iterator[list[int]]:
    """While workers run, the parent passes signals on: SIGTERM, SIGHUP and the first Ctrl-C ask them to save and end,
    SIGUSR1 to save and go on; a second Ctrl-C kills them. Yields the list of the ending signals received so far."""
    received: list[int] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        if signum != signal.SIGUSR1:
            if signal.SIGINT in received and signum == signal.SIGINT:
                tell_children(signal.SIGKILL)
                raise Interrupted(signum)
            received.append(signum)
            if signum == signal.SIGINT:
                say_ending()
        tell_children(signal.SIGUSR1 if signum == signal.SIGUSR1 else signal.SIGTERM)

    with handling(handler, *PASSED_ON):
        yield received


@contextmanager
def held() -> Iterator[None]:
    """A process that is started in here gets its signals when it has handlers of its own and calls `let_in`: Python
    forgets what comes before a fork's first line. To this process they may come all the same, by another thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        yield
    finally:
        let_in()


def let_in() -> None:
    """See `held`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """While there is nothing to save: SIGTERM and Ctrl-C raise `Interrupted`, there and then."""

    def handler(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(signum)

    with handling(handler, *ENDING):
        yield


def say_ending() -> None:
    """Answers the first Ctrl-C. Past Python's streams: a signal handler may interrupt them."""
    with suppress(OSError):
        newline = "\n" * os.isatty(2)  # after the ^C
        os.write(2, f"{newline}SIGINT: saving and ending; once more ends at once\n".encode())


def tell_children(signum: int) -> None:
    """Sends a signal to what this process has started with multiprocessing."""
    for child in multiprocessing.active_children():
        if child.pid:
            with suppress(ProcessLookupError):  # the signal came while multiprocessing took note of its end
                os.kill(child.pid, signum)


def set_parent_death_signal(parent: int) -> None:
    """Ends this process when its parent is killed, or was before this call (Linux: prctl(PR_SET_PDEATHSIG); elsewhere
    nothing notices at once)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def end_children() -> None:
    """Ends the loader processes of a worker that is done. They ignore SIGTERM, which is how multiprocessing would ask
    them at exit, and then wait for them for ever."""
    reports = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a loader process is killed
    children = [child for child in multiprocessing.active_children() if child.daemon]
    for child in children:
        child.kill()
    for child in children:
        child.join()
    signal.signal(signal.SIGCHLD, reports)
