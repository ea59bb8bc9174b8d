"""The folder of a run or a sweep: its name, its lock, and its removal if the run is refused."""

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep.config import value_checks
from lockstep.config.arguments import key
from lockstep.config.hydra_quirks import register_resolver
from lockstep.errors import UserError
from lockstep.launch import slurm
from lockstep.launch.environment import environment, external_workers
from lockstep.launch.process_group import broadcast_from_rank_zero, decide_on_rank_zero
from lockstep.report.provenance import MACHINE_KEYS
from lockstep.report.summary import summary_of
from lockstep.trainer import lock

LOCK = ".lock"
# names of the files and folders that Lockstep writes into a run's folder before its first checkpoint
RUN_FILES = {".hydra", "multirun.yaml", "train.log", "provenance.json", "git.diff", "summary.json"}
RUN_FILES |= {"tensorboard", "csv", "wandb", "loggers.json", LOCK}


# --- its name ---


def register_folder() -> None:
    """Register the OmegaConf resolver `folder`. conf/hydra/default.yaml uses it to name the folder of a new run."""
    register_resolver("folder", _new_folder)


def _new_folder(kind: str, outputs: Any, name: Any, overrides: Any) -> str:
    """Return the folder of a new run or sweep, the same on all ranks.

    Its name is the start time. In a SLURM job, or with torchrun's --rdzv-id, the name follows from the job or the id.
    A job that is started again then continues in the same folder.

    Args:
        kind: `runs` or `sweeps`.
        outputs: the key `outputs`.
        name: the key `name`.
        overrides: the arguments of the command line.
    """
    parent = Path(value_checks.folder("outputs", outputs), value_checks.run_name("name", name))
    if kind == "sweeps":
        parent /= "sweeps"

    def folder_name() -> str:
        job_folder = slurm.folder_of_job(parent, overrides) or folder_of_rendezvous(parent, overrides)
        return job_folder.name if job_folder else datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")

    return str(parent / decide_on_rank_zero(kind, folder_name))


def folder_of_rendezvous(runs: Path, overrides: Iterable[object]) -> Path | None:
    """Return the folder of the run that torchrun's `--rdzv-id=<name>` names.

    Without a name, the folder of a run is known only as long as one of its torchrun agents runs, see
    `decide_on_rank_zero`. With a name, machines continue the run even if torchrun was started again on all of them.
    Return None if there is no name, or if the run is completed.
    """
    name = environment().rdzv_name
    if not name:
        return None
    shared_overrides = [each for each in map(str, overrides) if key(each) not in MACHINE_KEYS]
    folder = runs / f"{re.sub('[^0-9A-Za-z_.-]', '_', name)}_{slurm.hash_of_command(shared_overrides)}"
    return None if summary_of(folder).get("status") == "completed" else folder


# --- its lock ---


class FolderBusy(UserError):
    """Another process writes the folder, so this one must not change it."""


@contextmanager
def lock_folder(folder: Path, writes: bool = True) -> Iterator[None]:
    """Hold the lock of a folder. Make the folder if it does not exist.

    Among the workers of an engine all must call this. Rank zero takes the lock, and all raise its error.

    Args:
        folder: the folder of a run or a sweep.
        writes: whether this process writes the folder; other processes take no lock.
    """
    is_ours = lock_on_rank_zero(folder) if external_workers() else writes and _lock(folder)
    try:
        yield
    except BaseException:
        if external_workers():  # this process ends soon, but still has files of the folder open: it keeps the lock
            is_ours = False
        raise
    finally:
        if is_ours:
            lock.release(folder / LOCK)


def lock_on_rank_zero(folder: Path) -> bool:
    """Lock a folder in the rank zero of an engine's workers. All must call this, and all raise its error.

    Return whether this process has locked it now.
    """
    is_ours, refused = False, ""
    try:
        is_ours = environment().rank == 0 and _lock(folder)
    except UserError as refusal:
        refused = str(refusal)
    if refused := broadcast_from_rank_zero(refused):
        raise FolderBusy(refused)
    return is_ours


def _lock(folder: Path) -> bool:
    """Lock a folder. Return False if this process has locked it before."""
    if lock.holds(folder / LOCK):
        return False
    if holder := lock.take(folder / LOCK):
        raise FolderBusy(f"{folder}: {holder} works in this folder: wait until it ends, or stop it")
    return True


# --- its removal ---


def remove_refused_folder(folder: Path) -> None:
    """Remove the folder of a refused run or sweep.

    The folder stays if the run has made a step, or if it holds a checkpoint or a file that Lockstep does not write.
    """
    holds_our_files_only = folder.is_dir() and all(
        path.name in RUN_FILES or re.fullmatch(r"rank_\d+\.log", path.name) for path in folder.iterdir()
    )
    if holds_our_files_only and not summary_of(folder).get("steps"):
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # the parent folder may hold other runs
            folder.parent.rmdir()
            if folder.parent.name == "sweeps":
                folder.parent.parent.rmdir()
