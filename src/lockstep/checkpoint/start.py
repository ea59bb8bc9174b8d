"""Where a worker starts: it reads the checkpoint that its run goes on from, once. When the first step is made, nothing
is refused any more, and the run's folder gets the new config."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import paths
from lockstep.checkpoint.copies import share_newest
from lockstep.checkpoint.io import CheckpointError, Loaded
from lockstep.checkpoint.resume import RECORD, write_record
from lockstep.files import same_file
from lockstep.launch import slurm
from lockstep.launch.environment import environment
from lockstep.launch.outcomes import WorkerFailed
from lockstep.launch.process_group import broadcast_from_rank_zero, gather_objects

LOG = logging.getLogger("lockstep")


def load_start(
    folder: Path, resume: str | None, record: Mapping[str, str] | None, ranks: Sequence[int]
) -> Loaded | None:
    """Return the checkpoint that a run goes on from, as rank zero has it; None: it begins. All workers call it.

    It is the last one, or the one that the user has named. Where the last one is damaged, and the user has not named
    it, it is the best one.

    Args:
        folder: the run's, on each machine its own.
        resume: the checkpoint that the user has named, in the run's folder on some machine.
        record: the texts of the files in `.hydra/` that tell what the run is made of, by name.
        ranks: those that write in the folder, as `ranks_with_folder` returns them.

    Raises:
        CheckpointError: it can't be used.
    """
    path, best = checkpoint_to_load(folder, resume, record), paths.best(folder)
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
        LOG.warning("%s; trying what is older", error)
        return Loaded(str(best), checkpoint_io.load(best, together=True))


def checkpoint_to_load(folder: Path, resume: str | None, record: Mapping[str, str] | None) -> Path:
    """Return the path of the checkpoint that a run goes on from, whether it exists or not. All workers call it."""
    last = paths.last(folder)
    if resume is None or Path(resume).name == last.name:
        return last
    # The same command, started again, has gone back already: it goes on with what it has made since.
    restarted = bool(environment().restarts) or slurm.restarted()
    again = restarted and bool(record) and _recorded_overrides(folder) == (record or {}).get(RECORD)
    return last if any(gather_objects(again)) else last.with_name(Path(resume).name)


class ClaimFolder(Callback):
    """After the first step, or at the end of a run that has none to make, writes `.hydra/` and makes the checkpoint
    that the run went on from its last one. Until then the folder is that of the run before.

    Args:
        folder: the run's.
        record: the texts of the files in `.hydra/`, by name.
        start: the checkpoint that the run goes on from, if there is one.
        writes: whether this rank writes in the folder.
    """

    def __init__(self, folder: Path, record: Mapping[str, str] | None, start: str | None, writes: bool) -> None:
        self._folder, self._record, self._checkpoint, self._due = folder, record or {}, start, writes

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:  # Lightning calls what saves later
        if self._due:
            self._take()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._due:  # something is saved although no step was left to make
            self._take()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._due:
            self._take()

    def _take(self) -> None:
        self._due = False
        write_record(self._folder, self._record)
        if self._checkpoint and Path(self._checkpoint).exists():
            same_file(self._checkpoint, paths.last(self._folder))


def _recorded_overrides(folder: Path) -> str:
    """The overrides of the run in a folder."""
    file = folder / ".hydra" / RECORD
    return file.read_text() if file.exists() else ""


def restore_good_checkpoint(folder: Path, fault: WorkerFailed) -> None:
    """Make a run's last checkpoint the newest one of those kept that a device's fault has not spoilt.

    Raises:
        WorkerFailed: the fault; there is none.
    """
    last = paths.last(folder)
    for path in (last, *reversed(paths.step_checkpoints(last.parent).values())):
        if checkpoint_io.load(path)["global_step"] <= fault.last_good_step:
            return same_file(path, last)
    raise fault
