"""Where a `lockstep.Trainer` writes its checkpoints, and which run `ckpt_path="last"` continues.

Each run has a folder of its own, which its first process makes: the version folder of the first logger, as Lightning's
ModelCheckpoint does; without a logger `default_root_dir`; and `version_1`, `version_2` and so on in it, if another run
has written there. Making the subfolder `checkpoints` is atomic, so two programs that start at once get two folders.
"""

import hashlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import paths
from lockstep.errors import UserError
from lockstep.launch.environment import environment
from lockstep.launch.process_group import broadcast_from_rank_zero
from lockstep.text import is_url
from lockstep.trainer import lock

LOCK = ".checkpoints.lock"  # in the run's folder, as long as a process trains there
LOGS = "lightning_logs"  # the folder of Lightning's default logger


def root_folder(root: str | os.PathLike[str] | None) -> Path:
    """Return `default_root_dir` as an absolute path; `~` is the user's home.

    Raises:
        UserError: it is no folder of this machine.
    """
    if root is None or root == "":
        return Path.cwd()
    return local_path("Trainer(default_root_dir=...)", root)


def local_path(what: str, path: str | os.PathLike[str]) -> Path:
    """Return a path of this machine as an absolute one; `~` is the user's home.

    Args:
        what: what it is, for the message.
    """
    text = os.fspath(path)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if is_url(text):
        raise UserError(
            f"{what}: {text} is no folder or file of this machine: give a local path, and copy what must go elsewhere"
        )
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise UserError(f"{what}: {text}: there is no such user: give a path without ~")
    return Path(os.path.abspath(expanded))


def command() -> list[str]:
    """Return the words of this process's command as hashes, since words may be secret; empty without a program."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else []
    if words[:1] == ["-c"] and "--multiprocessing-fork" not in sys.orig_argv:
        words.insert(1, sys.orig_argv[-len(words)])  # the code, which `argv` lacks
    elif not hasattr(sys.modules["__main__"], "__file__"):  # a notebook's command has a name that changes
        return []
    return [hashlib.sha256(os.fsencode(word)).hexdigest()[:12] for word in words]


class RunFolder(pl.Callback):
    """The folder of a Trainer's run. As a callback, it makes the folder before the first step.

    Args:
        root: `default_root_dir`.
        seed: the Trainer's seed.
        use: is called with the folder on all ranks, once it is known.

    Attributes:
        path: the folder; None as long as no fit has begun.
        continued: the folder of the run that the next fit continues; None: it is a new run.
    """

    def __init__(self, root: Path, seed: int, use: Callable[[Path], None]) -> None:
        self.root, self._seed, self._use = root, seed, use
        self.path: Path | None = None
        self.continued: Path | None = None
        self._followers: list[ModelCheckpoint] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Here, since Lightning has created the experiments of loggers, which may name their version.
        if stage == "fit" and self.path is None:
            refused = run = ""
            if trainer.is_global_zero:
                try:
                    run = str(self._make(_place(trainer, self.root)))
                except OSError as error:
                    refused = f"{error.filename}: checkpoints can't be written there ({error.strerror})"
            run, refused = broadcast_from_rank_zero((run, refused))
            if refused:
                raise UserError(f"{refused}: give another default_root_dir")
            self.path = Path(run)
            self._use(self.path)
        # Those without a folder write there, too. Lightning gives them one in the first method that is called.
        savers = (each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint))
        self._followers += [each for each in savers if each.dirpath is None]
        if self.path is not None:
            for each in self._followers:
                each.dirpath = str(paths.folder(self.path))

    def _make(self, place: Path) -> Path:
        """Return the folder of the run that is continued, or make one for a new run."""
        continued = self.continued
        if continued is not None and continued in _runs_in(place) and try_lock(continued):
            return continued
        return make_run(place)

    def release(self) -> None:
        """Unlock the folder at the end of a fit. Remove it if nothing was saved."""
        if self.path is None or not unlock(self.path):
            return
        with suppress(OSError):  # it is not empty
            paths.folder(self.path).rmdir()
            path, self.path = self.path, None
            if path != self.root:
                path.rmdir()

    def find_last(
        self, trainer: pl.Trainer, others: Iterable[Path], continues: bool
    ) -> tuple[Path | None, Path | None]:
        """Return the last checkpoint of this program's newest run, and the newest one that is of another program.

        A run belongs to this program if it has the Trainer's seed, and if its command had no word that the one of this
        process lacks. A run in which another process still trains does not.

        Args:
            others: last checkpoints of the user's own ModelCheckpoints.
            continues: whether a fit continues the run; an evaluation may read one of any program.
        """
        if self.path is not None and paths.last(self.path).exists():
            places = [self.path]
        else:
            place = _place(trainer, self.root)
            logs = self.root / LOGS if place == self.root else place.parent
            places = [*_runs_in(self.root), *(run for each in _folders(logs, "*") for run in _runs_in(each))]
        files = {each: _modified(each) for each in [*map(paths.last, places), *others]}
        foreign = None
        for file in sorted(filter(files.get, files), key=lambda each: files[each], reverse=True):
            if not continues or self._is_ours(file):
                return file, foreign
            foreign = foreign or file
        return None, foreign

    def _is_ours(self, file: Path) -> bool:
        """Check whether a checkpoint is of this program. One that can't be read is, so that an error names it."""
        try:
            record = checkpoint_io.load(file, tensors=False)["lockstep"]
            saved, seed = record.get("command", []), record["trainer"]["seed"]
        except (UserError, AttributeError, KeyError, TypeError):
            return True
        if seed != self._seed or Counter(saved) - Counter(command()):
            return False
        return environment().rank > 0 or try_lock(paths.run_of(file))


def _place(trainer: pl.Trainer, root: Path) -> Path:
    """Return the folder in which a new run's checkpoints are: the one that Lightning's ModelCheckpoint has."""
    if not trainer.loggers:
        return root
    logger: Any = trainer.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    folder = str(logger.save_dir or root)
    return Path(root if is_url(folder) else os.path.abspath(folder), str(logger.name), version)


def _folders(parent: Path, pattern: str) -> list[Path]:
    return [each for each in parent.glob(pattern) if each.is_dir()]


def _runs_in(place: Path) -> list[Path]:
    """Return the folders of the runs that began in a folder: it, and its version_1, version_2, ..."""
    return [place, *_folders(place, "version_*")]


def _modified(file: Path) -> int:
    """Return when a file was written; 0 if there is none."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def make_run(place: Path) -> Path:
    """Make the folder of a new run: `place`, or the first of its version_1, version_2, ... that no run has.

    Raises:
        OSError: it can't be written.
    """
    for number in itertools.count():
        run = place / f"version_{number}" if number else place
        run.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            paths.folder(run).mkdir()
            try_lock(run)
            return run
    raise AssertionError


def try_lock(run: Path) -> bool:
    """Lock a run's folder. Return False if another process has it."""
    try:
        return not lock.take(run / LOCK)
    except OSError:  # the folder can be read only, so nobody trains there
        return True


def unlock(run: Path) -> bool:
    """Unlock a run's folder. Return False if this process has not locked it."""
    if not lock.holds(run / LOCK):
        return False
    with suppress(OSError):
        (run / LOCK).unlink()
    lock.release(run / LOCK)
    return True
