"""The start of a worker: it reads the checkpoint from which its run continues, once.

The run's folder gets the new config after the first step, because nothing is refused after that.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import paths
from lockstep.checkpoint.io import CheckpointError, Loaded, step_of
from lockstep.checkpoint.resume import OVERRIDES, write_hydra_files
from lockstep.files import link_file, write
from lockstep.launch import slurm
from lockstep.launch.environment import environment
from lockstep.launch.outcomes import WorkerFailed
from lockstep.launch.process_group import broadcast_file, broadcast_from_rank_zero, gather_objects

LOG = logging.getLogger("lockstep")


def load_start(
    folder: Path, resume: str | None, hydra_files: Mapping[str, str] | None, ranks: Sequence[int]
) -> Loaded | None:
    """Return rank zero's checkpoint from which a run continues; None for a new run. All workers must call it.

    It is the last checkpoint, or the one that the user has named. If the last one is damaged and the user has not named
    it, it is the best one.

    Args:
        folder: the run's folder on this machine.
        resume: the checkpoint that the user has named; at least one machine has it in the run's folder.
        hydra_files: the texts of the files in `.hydra/`, by file name.
        ranks: the ranks that write in the folder, from `ranks_with_folder`.

    Raises:
        CheckpointError: the checkpoint can't be used.
    """
    path, best = checkpoint_to_load(folder, resume, hydra_files), paths.best(folder)
    share_newest(path, ranks)
    named = resume is not None and not environment().restarts
    exists, has_best, named = broadcast_from_rank_zero((path.exists(), best.exists(), named))
    if not exists and not named:
        return None
    try:
        return Loaded(str(path), checkpoint_io.load(path, together=True))
    except CheckpointError as error:
        if named or not has_best:
            raise
        LOG.warning("%s; continuing from the older %s", error, best.name)
        return Loaded(str(best), checkpoint_io.load(best, together=True))


def checkpoint_to_load(folder: Path, resume: str | None, hydra_files: Mapping[str, str] | None) -> Path:
    """Return the path of the checkpoint from which a run continues. It may not exist. All workers must call it."""
    last = paths.last(folder)
    if resume is None or Path(resume).name == last.name:
        return last
    # A restarted command has already gone back to `resume` once. It continues from the checkpoints that it saved since.
    restarted = bool(environment().restarts) or slurm.restarted()
    recorded, overrides = folder / ".hydra" / OVERRIDES, (hydra_files or {}).get(OVERRIDES)
    went_back = restarted and recorded.exists() and recorded.read_text() == overrides
    return last if any(gather_objects(went_back)) else last.with_name(Path(resume).name)


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


class ClaimFolder(Callback):
    """Takes over the folder of a resumed run: writes `.hydra/`, and makes the checkpoint that was read its last one.

    This happens after the first step, or at the end of a run without a step. Until then the folder keeps the earlier
    run's files.

    Args:
        folder: the run's folder.
        hydra_files: the texts of the files in `.hydra/`, by file name.
        start: the checkpoint from which the run continues, if there is one.
        writes: whether this rank writes in the folder.
    """

    def __init__(self, folder: Path, hydra_files: Mapping[str, str] | None, start: str | None, writes: bool) -> None:
        self._folder, self._hydra_files = folder, hydra_files or {}
        self._checkpoint, self._due = start, writes

    def _take(self, *args: Any, **kwargs: Any) -> None:
        if not self._due:
            return
        self._due = False
        write_hydra_files(self._folder, self._hydra_files)
        if self._checkpoint and Path(self._checkpoint).exists():
            link_file(self._checkpoint, paths.last(self._folder))

    # After a step, since Lightning calls callbacks that save later; without one, before a checkpoint or at the end.
    on_train_batch_end = on_save_checkpoint = on_fit_end = _take


def restore_good_checkpoint(folder: Path, fault: WorkerFailed) -> None:
    """Replace a run's last checkpoint by the newest one that a device's wrong values have not affected.

    Args:
        folder: the run's folder.
        fault: the failure that found the wrong values; it has `last_good_step`.

    Raises:
        WorkerFailed: there is no such checkpoint; this is `fault`.
    """
    last = paths.last(folder)
    for path in (last, *reversed(paths.step_checkpoints(last.parent).values())):
        if checkpoint_io.load(path)["global_step"] <= fault.last_good_step:
            return link_file(path, last)
    raise fault
