"""Copies of a run's checkpoints on other machines, so that the run survives the loss of any machine.

On each machine that does not see the run's folder, one rank keeps last.ckpt and best.ckpt in a folder of the same name.
When a run starts, the newest checkpoint is sent to the machines that lack it.
"""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lockstep.checkpoint import paths
from lockstep.checkpoint.io import step_of
from lockstep.files import write
from lockstep.launch.process_group import broadcast_file, gather_objects


class Copies:
    """Sends the files that rank zero has written to the ranks that keep copies. All ranks must create it.

    One thread of each of these ranks uses it while training runs its own collectives, so it has a separate process
    group.

    Args:
        ranks: rank zero and the ranks that keep copies.
        timeout: seconds after which a transfer fails.

    Attributes:
        keeps_copies: whether this rank keeps copies.
    """

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        self._group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout), backend="gloo")
        self.keeps_copies = dist.get_rank() in ranks[1:]

    def send(self, path: Path | None) -> None:
        """Send a file. Rank zero calls it; `path` is None if the file could not be written."""
        broadcast_file(path, 0, self._group)

    def receive(self, path: Path) -> None:
        """Write the next file that rank zero sends."""
        content = broadcast_file(None, 0, self._group)
        if content is not None:
            write(path, content)


def share_newest(start: Path, ranks: Sequence[int]) -> None:
    """Send the newest checkpoints to the machines that lack them. All ranks must call it.

    The files are the newest version of the checkpoint from which a run continues, and the best checkpoint beside it.

    Args:
        start: the path of the checkpoint in this machine's folder of the run.
        ranks: the ranks that write in the folder, from `ranks_with_folder`.
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
