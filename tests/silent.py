"""A worker that takes long over its first step: a spawned process imports this file, and needs little for it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from lockstep.launch import watchdog


def silent(rank: int, busy: str, together: Any) -> None:
    """What rank zero does, for which the other one waits: it `writes` to a slow disk, or `stops` while it writes."""
    together.wait()
    watchdog.join(rank)
    if busy == "writes":
        if rank == 0:
            with watchdog.patient():
                time.sleep(3)
    elif rank == 0:
        with watchdog.patient():
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(600)
    together.wait()
    watchdog.leave()
