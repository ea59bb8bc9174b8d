"""Signals: the parent forwards them, and a worker records them until its optimizer step is done.

`set_parent_death_signal` and `end_children` make sure that no process outlives its parent.
"""

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
    """A signal ended the run. It is not an `Exception`, so that it ends a whole sweep and not only one job.

    Attributes:
        signum: the number of the signal.
        code: the exit code: 130 for SIGINT, else 143.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum
        self.code = 130 if signum == signal.SIGINT else 143

    def __reduce__(self) -> tuple[type["Interrupted"], tuple[int]]:
        """Support pickling: Hydra's launchers that run jobs in other processes pickle the exception of a job."""
        return Interrupted, (self.signum,)


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal or the ssh connection was closed
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
HANDLED = (*ENDING, *USER_SIGNALS)  # blocked while processes are started, see `block_signals`
pending_signals: list[int] = []  # the signals that this worker has received
# The handlers that ours have replaced, by signal. Some belong to an outer program that runs this one, such as submitit.
_earlier_handlers: dict[int, Any] = {}


def record_signal(signum: int, frame: FrameType | None) -> None:
    """Record a signal. This is a worker's handler. It starts no collective, since other ranks may be in another one."""
    pending_signals.append(signum)


def interrupt(signum: int, frame: FrameType | None) -> None:
    """Handle a signal: raise Interrupted, for a program that has to clean up."""
    raise Interrupted(signum)


def ignores_hangup(signum: int = signal.SIGHUP) -> bool:
    """Check whether `signum` is SIGHUP and this process ignores it, as under nohup."""
    return signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN


@contextmanager
def signal_handler(handler: Callable[[int, FrameType | None], None], *signals: int) -> Iterator[None]:
    """Handle signals with `handler` inside the `with` block. SIGHUP stays ignored under nohup.

    Only a main thread can have handlers. In another thread (Ray Train runs a worker's function in one) do nothing: the
    program that owns the main thread handles the signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier_handlers = {number: signal.signal(number, handler) for number in signals if not ignores_hangup(number)}
    _earlier_handlers.update(earlier_handlers)
    try:
        yield
    finally:
        for number, earlier_handler in earlier_handlers.items():
            signal.signal(number, earlier_handler)


def ending_signals() -> tuple[int, ...]:
    """Return the signals on which a run saves a checkpoint and ends.

    Under SLURM, SIGUSR1 and SIGUSR2 are included, because they announce the end of the job's time. Elsewhere SIGUSR2 is
    included if an outer program has a handler for it, as submitit does. Where SIGUSR1 is not included, a run saves a
    checkpoint on it and continues.
    """
    if environment().slurm_job:
        return (*ENDING, *USER_SIGNALS)
    return (*ENDING, *([signal.SIGUSR2] if callable(signal.getsignal(signal.SIGUSR2)) else []))


def call_earlier_handler(signum: int) -> None:
    """Call the outer program's handler for the signal that ended the run. Call it after the checkpoint is saved."""
    handler = _earlier_handlers.get(signum)
    is_ours = getattr(handler, "__module__", "").startswith("lockstep.")
    if callable(handler) and not is_ours and handler is not signal.default_int_handler:
        handler(signum, None)


@contextmanager
def forward_signals() -> Iterator[list[int]]:
    """Forward signals from the parent to its workers inside the `with` block.

    Every ending signal is forwarded as SIGTERM: workers save a checkpoint and end. SIGUSR1 is forwarded as itself:
    workers save a checkpoint and continue. A second Ctrl-C kills them. Yield a list of the ending signals received.
    """
    received: list[int] = []
    signals = ending_signals()

    def handler(signum: int, frame: FrameType | None) -> None:
        if signum in signals:
            if signal.SIGINT in received and signum == signal.SIGINT:
                signal_children(signal.SIGKILL)
                raise Interrupted(signum)
            received.append(signum)
            if signum == signal.SIGINT:
                print_ending()
        signal_children(signal.SIGTERM if signum in signals else signal.SIGUSR1)

    with signal_handler(handler, *{*signals, signal.SIGUSR1}):
        yield received


@contextmanager
def block_signals() -> Iterator[None]:
    """Block signals inside the `with` block, so that a process started in it begins with signals blocked.

    The started process installs its handlers and calls `unblock_signals`. If signals were not blocked, one that arrives
    before the first Python line of a fork would be lost. Another thread of this process may still receive signals.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        unblock_signals()


def unblock_signals() -> None:
    """Unblock the signals that `block_signals` has blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)


def print_ending() -> None:
    """Print the line that follows the first Ctrl-C. Bypass Python's streams, because the handler may interrupt them."""
    with suppress(OSError):
        newline = "\n" * os.isatty(2)  # a terminal has printed ^C in the current line
        os.write(2, f"{newline}SIGINT: saving a checkpoint, then ending; press Ctrl-C again to end now\n".encode())


def signal_children(signum: int) -> None:
    """Send a signal to the processes that this one has started with multiprocessing."""
    for child in multiprocessing.active_children():
        if child.pid:
            with suppress(ProcessLookupError):  # it may have ended in the meantime
                os.kill(child.pid, signum)


def set_parent_death_signal(parent: int) -> None:
    """Kill this process when its parent is killed, or now if that has already happened.

    It uses prctl(PR_SET_PDEATHSIG), and does nothing on systems other than Linux. `parent` is the parent's process id.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def end_children() -> None:
    """Kill the loader processes of a worker that is done.

    multiprocessing would send them SIGTERM at exit, which they ignore, and then wait for them forever.
    """
    with signal_handler(lambda *_: None, signal.SIGCHLD):  # torch's handler raises when a loader process is killed
        children = [child for child in multiprocessing.active_children() if child.daemon]
        for child in children:
            child.kill()
        for child in children:
            child.join()
