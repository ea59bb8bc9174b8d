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
from lockstep.launch.endings import WorkerFailed
from lockstep.launch.environment import environment
from lockstep.launch.process_group import of_rank_zero, of_ranks

LOG = logging.getLogger("lockstep")


class RunStart:
    """The checkpoint that a run goes on from. Every worker makes one.

    Args:
        folder: the run's, on each machine its own.
        resume: the checkpoint that the user has named, in the run's folder on some machine; None: the last one, if
            there is one.
        record: the texts of the files in `.hydra/` that tell what the run is made of, by name.
        ranks: those that write in the folder, as `ranks_with_folder` returns them.
    """

    def __init__(self, folder: Path, resume: str | None, record: Mapping[str, str], ranks: Sequence[int]) -> None:
        self.folder, self.record = folder, record
        self.path = paths.last(folder)
        self._named = resume is not None and not environment().restarts
        if resume is not None and Path(resume).name != self.path.name:
            # The same command, started again: it has gone back already, and goes on with what it has made since.
            restarted = environment().restarts or slurm.restarted()
            again = bool(restarted) and _recorded(folder) == record.get(RECORD)
            if not any(of_ranks(again)):
                self.path = self.path.with_name(Path(resume).name)
        share_newest(self.path, ranks)

    def load(self) -> Loaded | None:
        """Return the checkpoint as rank zero has it, on all ranks. Where the last one is damaged and the user has not
        named it, return the best one; where there is none, None.

        Raises:
            CheckpointError: none can be used.
        """
        best = paths.best(self.folder)
        exists, has_best, named = of_rank_zero((self.path.exists(), best.exists(), self._named))
        if not exists and not named:
            return None
        try:
            return Loaded(str(self.path), checkpoint_io.load(self.path, together=True))
        except CheckpointError as error:
            if named or not has_best:
                raise
            LOG.warning("%s; trying what is older", error)
            return Loaded(str(best), checkpoint_io.load(best, together=True))


class TakeFolder(Callback):
    """After the first step, or at the end of a run that has none to make, writes `.hydra/` and makes the checkpoint
    that the run went on from its last one. Until then the folder is that of the run before.

    Args:
        start: where the run starts.
        writes: whether this rank writes in the folder.
    """

    def __init__(self, start: RunStart, writes: bool) -> None:
        self._start, self._due = start, writes

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:  # Lightning calls what saves later
        if self._due:
            self._take()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._due:
            self._take()

    def _take(self) -> None:
        self._due = False
        write_record(self._start.folder, self._start.record)
        if self._start.path.exists():
            same_file(self._start.path, paths.last(self._start.folder))


def _recorded(folder: Path) -> str:
    """The overrides of the run in a folder."""
    file = folder / ".hydra" / RECORD
    return file.read_text() if file.exists() else ""


def go_back(folder: Path, fault: WorkerFailed) -> None:
    """Make a run's last checkpoint the newest one of those kept that a device's fault has not spoilt.

    Raises:
        WorkerFailed: the fault; there is none.
    """
    last = paths.last(folder)
    for path in (last, *reversed(paths.steps_kept(last.parent).values())):
        if checkpoint_io.load(path)["global_step"] <= fault.right:
            return same_file(path, last)
    raise fault
