"""A worker that takes long over its first step: a spawned process imports this file, and needs little for it."""

from __future__ import annotations

import time
from typing import Any

from lockstep import heartbeat


def silent(rank: int, busy: bool, together: Any) -> None:
    together.wait()
    heartbeat.join(rank)
    if busy:
        heartbeat.compiling(True)
    time.sleep(6)
    if busy:
        heartbeat.compiling(False)
    heartbeat.leave()
