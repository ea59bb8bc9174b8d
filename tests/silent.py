"""A worker that takes long over its first step: a spawned process imports this file, and needs little for it."""

from __future__ import annotations

import time
from typing import Any

from lockstep import heartbeat


def silent(rank: int, busy: bool, together: Any) -> None:
    """`busy`: rank zero compiles; else both are silent until they are ended."""
    together.wait()
    heartbeat.join(rank)
    if busy and rank == 0:
        heartbeat.compiling(True)
    time.sleep(5 if busy else 600)
    together.wait()
    if busy and rank == 0:
        heartbeat.compiling(False)
    heartbeat.leave()
