"""Copies of a run's checkpoints, so that it outlives any machine: one rank of each machine that does not see the run's
folder keeps last.ckpt and best.ckpt in a folder of the same name; when a run starts, the newest is sent to all."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lockstep.checkpoint import paths
from lockstep.checkpoint.io import step_of
from lockstep.files import write
from lockstep.launch.process_group import broadcast_file, gather_objects


class Copies:
    """Sends the files that rank zero has written to the ranks that keep copies. It is used by one thread of each of
    them, beside the training's collectives, so it has a process group of its own. All ranks make it.

    Args:
        ranks: rank zero and those that keep copies.
        timeout: seconds after which a rank that does not answer is lost.
    """

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        self._group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout), backend="gloo")
        self.receives = dist.get_rank() in ranks[1:]

    def send(self, path: Path | None) -> None:
        """Send a file, on rank zero; None: it could not be written."""
        broadcast_file(path, 0, self._group)

    def receive(self, path: Path) -> None:
        """Write the next file that rank zero sends."""
        content = broadcast_file(None, 0, self._group)
        if content is not None:
            write(path, content)


def share_newest(start: Path, ranks: Sequence[int]) -> None:
    """Give each machine the newest file that a machine has of the checkpoint which a run goes on from, and the best
    checkpoint beside it. All ranks call it.

    Args:
        start: the checkpoint, on each machine in its own folder of the run.
        ranks: those that write in it, as `ranks_with_folder` returns them.
    """
    if len(ranks) == 1:
        return
    writes = dist.get_rank() in ranks
    steps = gather_objects(step_of(start) if writes else -1)
    newest = max(ranks, key=lambda rank: (steps[rank], -rank))
    lacking = [rank for rank in ranks if steps[rank] != steps[newest]]
    if not lacking:
        return
    for path in (paths.best(paths.run_of(start)), start):
        content = broadcast_file(path if dist.get_rank() == newest and path.exists() else None, newest)
        if dist.get_rank() not in lacking:
            continue
        if content is None:
            path.unlink(missing_ok=True)
        else:
            write(path, content)
