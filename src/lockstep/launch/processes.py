"""No process outlives the one that it works for."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys


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
