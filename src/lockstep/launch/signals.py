"""Signals of a run: the parent passes them on, a worker remembers them until an optimizer step is done. No process
outlives the one that it works for."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from lockstep.launch.environment import environment


class Interrupted(BaseException):
    """The run was asked to end by a signal, and did. Not an `Exception`: it ends a sweep, not only its job."""

    steps = 0  # optimizer steps that the workers had made, where there were any

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum
        self.code = 130 if signum == signal.SIGINT else 143

    def __reduce__(self) -> tuple[type["Interrupted"], tuple[int]]:
        """A launcher of Hydra's that runs jobs in processes of its own pickles what ended one."""
        return Interrupted, (self.signum,)


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal was closed, or ssh lost
USER = (signal.SIGUSR1, signal.SIGUSR2)
PASSED_ON = (*ENDING, *USER)
pending_signals: list[int] = []  # the signals that this worker was sent so far
_earlier_handlers: dict[int, Any] = {}  # the handlers that a program around the run had, when the run put its own there


def record_signal(signum: int, frame: FrameType | None) -> None:
    """A worker's signal handler. It only remembers: a collective in a handler would meet other ranks in another one."""
    pending_signals.append(signum)


def ignores_hangup(signum: int = signal.SIGHUP) -> bool:
    """Whether this is SIGHUP, and the process ignores it."""
    return signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN


@contextmanager
def signal_handler(handler: Callable[[int, FrameType | None], None], *signals: int) -> Iterator[None]:
    """While it lasts, signals are this handler's; SIGHUP stays ignored where it is, under nohup. Only a main thread has
    handlers: in another one (Ray Train runs a worker's function in one) whoever has that thread answers them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in signals if not ignores_hangup(number)}
    _earlier_handlers.update(before)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def ending_signals() -> tuple[int, ...]:
    """Return the signals that ask a run to save and end. Under SLURM, SIGUSR1 and SIGUSR2 are among them, which say
    that the job's time is up; elsewhere SIGUSR2 is where the program around the run answers it (submitit does), and
    SIGUSR1 asks to save and continue."""
    if environment().slurm_job:
        return (*ENDING, *USER)
    return (*ENDING, *([signal.SIGUSR2] if callable(signal.getsignal(signal.SIGUSR2)) else []))


def call_earlier_handler(signum: int) -> None:
    """Call the handler that the program around a run has for the signal which ended it, once the run has saved."""
    handler = _earlier_handlers.get(signum)
    is_ours = handler is signal.default_int_handler or getattr(handler, "__module__", "").startswith("lockstep.")
    if callable(handler) and not is_ours:
        handler(signum, None)


@contextmanager
def forward_signals() -> Iterator[list[int]]:
    """While workers run, the parent passes signals on: those that end a run ask the workers to save and end, SIGUSR1
    elsewhere to save and continue; a second Ctrl-C kills them. Yields the list of the ending signals received so
    far."""
    received: list[int] = []
    ending = ending_signals()

    def handler(signum: int, frame: FrameType | None) -> None:
        if signum in ending:
            if signal.SIGINT in received and signum == signal.SIGINT:
                signal_children(signal.SIGKILL)
                raise Interrupted(signum)
            received.append(signum)
            if signum == signal.SIGINT:
                print_ending()
        signal_children(signal.SIGTERM if signum in ending else signal.SIGUSR1)

    with signal_handler(handler, *{*ending, signal.SIGUSR1}):
        yield received


@contextmanager
def block_signals() -> Iterator[None]:
    """A process that is started in here gets its signals when it has handlers of its own and calls `unblock_signals`:
    Python forgets what comes before a fork's first line. To this process they may come all the same, by another
    thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        yield
    finally:
        unblock_signals()


def unblock_signals() -> None:
    """See `block_signals`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)


def print_ending() -> None:
    """Answers the first Ctrl-C. Past Python's streams: a signal handler may interrupt them."""
    with suppress(OSError):
        newline = "\n" * os.isatty(2)  # after the ^C
        os.write(2, f"{newline}SIGINT: saving and ending; once more ends at once\n".encode())


def signal_children(signum: int) -> None:
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
    with signal_handler(lambda *_: None, signal.SIGCHLD):  # torch's handler raises when a loader process is killed
        children = [child for child in multiprocessing.active_children() if child.daemon]
        for child in children:
            child.kill()
        for child in children:
            child.join()
