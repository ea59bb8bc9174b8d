"""Checkpoints that are whole or absent, are checked before they are trusted, and never run code.

A checkpoint is torch's own zip file, readable by plain `torch.load`, which does not look at the CRCs inside: a flipped
byte in the weights would load and train. `load` looks.
"""

import io
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import CheckpointIO
from lightning_utilities import apply_to_collection
from torch import Tensor, nn

from lockstep.checkpoint import paths
from lockstep.config.extras import CheckpointObserver
from lockstep.errors import UserError
from lockstep.files import replacing, same_file
from lockstep.launch.process_group import broadcast_file, broadcast_from_rank_zero

HYPERPARAMETERS = pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY


class CheckpointError(UserError):
    """A checkpoint that can't be used. One line: the file, and what is wrong with it."""


def save(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint atomically; until it is complete on the disk, `path` is what it was before.

    Raises:
        OSError: naming the path and the reason.
        CheckpointError: it holds more than plain data and tensors, so that `load` would have to refuse it.
    """
    with replacing(path) as file:
        try:
            torch.save(checkpoint, file)
        except RuntimeError as error:  # torch's zip writer buries the OSError in an assertion
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        file.flush()
        if code := _code(file.name):
            raise CheckpointError(f"{path}: not saved, loading it would run code: it holds {code}, not only data")


def fault(path: Path, checksums: bool = True) -> str:
    """Return what is wrong with a file, without loading it; empty: nothing.

    Args:
        checksums: whether to read all of it. Without, a file that is cut off or holds code is found in no time, and
            one with flipped bits is not.
    """
    if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would never end, a device has no end
        return "not a file"
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(part.file_size for part in archive.infolist()) > path.stat().st_size:  # torch.save does not pack
                return "refused, its parts are said to be larger than the file"
            whole = not checksums or archive.testzip() is None
    except FileNotFoundError:
        return "no such file"
    except zipfile.BadZipFile:
        return "the file is cut off, or none that torch.save wrote"
    except OSError as error:
        return f"can't be read ({error.strerror})"
    except Exception:  # struct.error, zlib.error, RuntimeError: whatever the damage leads to
        whole = False
    if not whole:
        return "the file is damaged: its checksums do not match"
    code = _code(path)
    return f"refused, it holds code, not only data: {code}" if code else ""


def _code(path: str | Path | IO[bytes]) -> str:
    """Names of the functions and classes in a checkpoint's pickle that plain data does not need; nothing is run."""
    try:
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)))
    except Exception:
        return ""  # not even a pickle that torch can read: `torch.load` says what it is


def refuse_broken(path: Path) -> None:
    """Refuse a file that is missing, cut off or holds code, in no time.

    Raises:
        CheckpointError: naming it.
    """
    if wrong := fault(path, checksums=False):
        raise CheckpointError(f"{path}: {wrong}")


class Loaded(NamedTuple):
    """A checkpoint that has been read."""

    path: str
    content: dict[str, Any]


def load(path: str | os.PathLike[str], together: bool = False) -> dict[str, Any]:
    """Read a checkpoint of Lockstep's or Lightning's with `weights_only=True`, whatever the environment says.

    Args:
        together: all ranks call it: rank zero reads the file, and the others, who may have no such file, get its bytes.

    Raises:
        CheckpointError: missing, cut off, damaged, of another kind, or holding code; `together`, on all ranks.
    """
    path = Path(path)
    checkpoint = load_plain(whole_file(path, together), path)
    if not isinstance(checkpoint, dict) or not {"state_dict", "pytorch-lightning_version"} <= checkpoint.keys():
        raise CheckpointError(f"{path}: not a Lockstep or Lightning checkpoint: no state_dict of a LightningModule")
    return checkpoint


def whole_file(path: Path, together: bool = False, check: Callable[[Path], str] = fault) -> Path | IO[bytes]:
    """Return what a file is read from, after a check: the file itself; `together`, on all ranks, rank zero's bytes.

    Args:
        check: returns what is wrong with the file; empty: nothing.

    Raises:
        CheckpointError: something is wrong; `together`, on all ranks.
    """
    ranks = together and dist.is_available() and dist.is_initialized()
    mine = not ranks or dist.get_rank() == 0
    wrong = check(path) if mine else ""
    if wrong := broadcast_from_rank_zero(wrong) if ranks else wrong:
        raise CheckpointError(f"{path}: {wrong}")
    if not ranks:
        return path
    return io.BytesIO(broadcast_file(path if mine else None) or b"")  # rank zero has checked it


def step_of(path: Path) -> int:
    """Return the optimizer step after which a checkpoint was saved; -1: there is none that can be used."""
    if path.exists() and not fault(path):
        with suppress(Exception):  # a made-up pickle can make torch raise anything
            return int(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"])
    return -1


def load_plain(source: Path | IO[bytes], path: Path) -> Any:
    """Return what torch.save wrote, read with `weights_only=True`, on the CPU.

    Raises:
        CheckpointError: naming `path`.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # a made-up pickle can make torch raise anything
        details = str(error).rpartition("WeightsUnpickler error: ")[2].strip()  # torch's advice is before it
        reason = (details or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path}: can't be loaded as plain data and tensors ({reason[:120]})") from error


def is_plain(value: Any) -> bool:
    """Whether `save` would write a value: it holds only plain data and tensors."""
    if isinstance(value, nn.Module):  # which need not be written to see that
        return False
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception:  # a pickle of anybody's object can fail in any way
        return False
    buffer.seek(0)
    return not _code(buffer)


def not_plain(values: Mapping[str, Any]) -> list[str]:
    """The names of the values that `save` would not write."""
    return [name for name, value in values.items() if not is_plain(value)]


class Sender(Protocol):
    """What sends rank zero's files to ranks that keep copies: `send` on rank zero, `receive` on those."""

    receives: bool

    def send(self, path: Path | None) -> None: ...

    def receive(self, path: Path) -> None: ...


class AtomicCheckpointIO(CheckpointIO):
    """`save` and `load` as a plugin of Lightning's Trainer. Training goes on while a copy of its state is written.

    One file is written at a time, in the order asked for. What goes wrong is raised by the next call, at the latest at
    the end of the Trainer's `fit`.

    Args:
        observers: see each checkpoint, in the thread that writes it.
        number: checkpoints that are kept besides (see `keep_step_checkpoint`).
        copies: what sends files to the machines that keep copies of them, if there are any.
        loaded: the checkpoint that the run goes on from: the first `load_checkpoint` of its path returns it.
    """

    def __init__(
        self,
        observers: Sequence[CheckpointObserver] = (),
        number: int = 0,
        copies: Sender | None = None,
        loaded: Loaded | None = None,
    ) -> None:
        self._observers, self._number, self._copies, self._loaded = observers, number, copies, loaded
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: list[Future[None]] = []
        self._not_plain: list[str] | None = None  # hyperparameters that are left out
        self.loaded_step: int | None = None  # of the checkpoint loaded last
        self.receives = copies is not None and copies.receives  # whether this rank writes what rank zero sends

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        self.wait()  # so that there is one copy at the most
        if self._copies is not None and self.receives:
            self.then(self._copies.receive, Path(path))
            return
        if isinstance(hyperparameters := checkpoint.get(HYPERPARAMETERS), dict):
            if self._not_plain is None:
                self._not_plain = not_plain(hyperparameters)
            plain_ones = {name: value for name, value in hyperparameters.items() if name not in self._not_plain}
            checkpoint = {**checkpoint, HYPERPARAMETERS: plain_ones}
        copy = apply_to_collection(checkpoint, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))
        if (metadata := getattr(checkpoint["state_dict"], "_metadata", None)) is not None:
            copy["state_dict"]._metadata = metadata  # versions of layers, which some of torchvision's ask for
        self.then(self._write, copy, Path(path))

    def then(self, task: Callable[..., None], *args: Any) -> None:
        """Does something after what is being written, if that goes well."""
        before = self._pending[-1] if self._pending else None

        def work() -> None:
            if before is not None:
                before.result()
            task(*args)

        self._pending.append(self._writer.submit(work))

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        written = None
        try:
            for observer in self._observers:
                observer.before_write(checkpoint)
            save(checkpoint, path)
            written = path
        finally:
            if self._copies is not None:
                self._copies.send(written)
        for observer in self._observers:
            observer.after_write()
        if self._number:
            keep_step_checkpoint(path, checkpoint["global_step"], self._number)

    def wait(self) -> None:
        """Returns when all is on the disk.

        Raises:
            OSError, CheckpointError: as `save`.
        """
        pending, self._pending = self._pending, []
        for task in pending:
            task.result()

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        loaded, self._loaded = self._loaded, None  # it is large: nothing refers to it once the run has begun
        checkpoint = loaded.content if loaded and loaded.path == str(path) else load(path, together=True)
        self.loaded_step = checkpoint.get("global_step")
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        self.wait()


def keep_step_checkpoint(last: Path, step: int, number: int) -> None:
    """Give `last`, saved after `step`, a second name that stays. Keep the `number` newest of these, all if it is -1;
    remove those of later steps, which a run that has gone back behind them makes again."""
    same_file(last, paths.step_path(last.parent, step))
    step_files = paths.step_checkpoints(last.parent)
    upto = [each for each in step_files if each <= step]
    for removed in step_files.keys() - set(upto if number < 0 else upto[-number:]):
        step_files[removed].unlink()


def weights_in_use(trainer: Any) -> tuple[str | None, int | None]:
    """The checkpoint file that an evaluation has taken its weights from (None: they are those of the training that has
    just ended), and the optimizer step after which they were saved."""
    path = trainer.ckpt_path
    return (None, trainer.global_step) if path is None else (str(path), trainer.strategy.checkpoint_io.loaded_step)
