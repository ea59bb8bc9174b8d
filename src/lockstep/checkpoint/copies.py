"""Copies of a run's checkpoints, so that it outlives any machine: one rank of each machine that does not see the run's
folder keeps last.ckpt and best.ckpt in a folder of the same name; when a run starts, the newest is sent to all."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint import paths
from lockstep.checkpoint.io import broadcast_bytes, bytes_of, fault
from lockstep.files import replacing
from lockstep.launch.process_group import of_ranks


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
        broadcast_bytes(bytes_of(path) if path else None, 0, self._group)

    def receive(self, path: Path) -> None:
        """Write the next file that rank zero sends."""
        content = broadcast_bytes(None, 0, self._group)
        if content is not None:
            _write(path, content)


def share_newest(folder: Path, ranks: Sequence[int]) -> None:
    """Give each machine the newest of the checkpoints that the machines have of a run. All ranks call it.

    Args:
        folder: the run's folder, on each machine its own.
        ranks: those that write in it, as `ranks_with_folder` returns them.
    """
    if len(ranks) == 1:
        return
    writes = dist.get_rank() in ranks
    files = [paths.best(folder), paths.last(folder)]  # the last one counts, so it is last
    steps = of_ranks(_steps(files[-1]) if writes else -1)
    newest = max(ranks, key=lambda rank: (steps[rank], -rank))
    lacking = [rank for rank in ranks if steps[rank] != steps[newest]]
    if not lacking:
        return
    for path in files:
        mine = dist.get_rank() == newest and path.exists()
        content = broadcast_bytes(bytes_of(path) if mine else None, newest)
        if dist.get_rank() not in lacking:
            continue
        if content is None:
            path.unlink(missing_ok=True)
        else:
            _write(path, content)


def _steps(path: Path) -> int:
    """The optimizer steps after which a checkpoint was saved; -1: there is none that can be used."""
    if path.exists() and not fault(path):
        with suppress(Exception):  # a made-up pickle can make torch raise anything
            return int(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"])
    return -1


def _write(path: Path, content: Tensor) -> None:
    with replacing(path) as file:
        file.write(content.numpy().data)
