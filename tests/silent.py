"""A worker that takes long over its first step: a spawned process imports this file, and needs little for it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from lockstep.launch import watchdog


def silent(rank: int, busy: str, together: Any) -> None:
    """What rank zero does, for which the other one waits: it `compiles`, or `writes` to a slow disk; it `stops` while
    it writes, or does `nothing`, and is silent until it is ended."""
    together.wait()
    watchdog.join(rank)
    if rank == 0 and busy == "compiles":
        watchdog.compiling(True)
        time.sleep(5)
        watchdog.compiling(False)
    elif rank == 0 and busy in ("writes", "stops"):
        with watchdog.patient():
            time.sleep(5 if busy == "writes" else 1)
            if busy == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
    elif busy in ("compiles", "writes"):
        time.sleep(5)
    else:
        time.sleep(600)
    together.wait()
    watchdog.leave()
