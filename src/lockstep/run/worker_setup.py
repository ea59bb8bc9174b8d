"""The first lines of every worker."""

from __future__ import annotations

from pathlib import Path

from lockstep.launch import logs
from lockstep.launch.environment import environment
from lockstep.run import fast
from lockstep.run.config import Config


def set_up_worker(config: Config, folder: Path) -> int:
    """This worker's log, threads and allocator; returns its rank."""
    rank = environment().rank
    logs.configure(folder, rank)
    fast.set_up(config.layout, config.threads, config.allocator)
    return rank
