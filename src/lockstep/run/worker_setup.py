"""The first lines of every worker."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.launch import logs
from lockstep.run import fast
from lockstep.run.config import Config


def set_up_worker(config: Config, folder: Path) -> int:
    """This worker's log, threads and allocator; returns its rank."""
    rank = int(os.environ.get("RANK", "0"))
    logs.configure(folder, rank)
    fast.set_up(config.layout, config.threads, config.allocator)
    return rank
