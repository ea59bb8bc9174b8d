"""The checkpoint file: it is written atomically, checked before it is loaded, and never runs code.

A checkpoint is torch's own zip file. `torch.load` does not check the CRCs in the file, so it would load weights with a
flipped byte. `load` checks them.

Tensors of which each process has a part may be in a folder beside the file, see `parts.py`. Of such a file, plain
`torch.load` and Lightning's `load_from_checkpoint` get tensors without data, which they can't copy.
"""

import io
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import CheckpointIO
from lightning_utilities import apply_to_collection
from torch import Tensor

from lockstep.checkpoint import foreign_files, paths
from lockstep.checkpoint.parts import (
    FOLDER,
    INDEX,
    Part,
    SavedParts,
    new_folder_name,
    tensors_in,
    without_data,
)
from lockstep.checkpoint.plain import code_in, with_plain_hyperparameters
from lockstep.checkpoint.record import check_format
from lockstep.config.extras import CheckpointObserver
from lockstep.errors import UserError
from lockstep.files import link_file, replacing, write
from lockstep.launch.process_group import broadcast_file, broadcast_from_rank_zero, gather_objects


class CheckpointError(UserError):
    """A checkpoint can't be used. The message is one line: the file, and what is wrong with it."""


def save(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint atomically. Until it is complete on the disk, `path` keeps its earlier content.

    Raises:
        OSError: it names the path and the reason.
        CheckpointError: the checkpoint holds more than plain data and tensors, so `load` would refuse it; or a tensor
            without data.
    """
    refuse_without_data(checkpoint, path)
    with replacing(path) as file:
        try:
            torch.save(checkpoint, file)
        except RuntimeError as error:  # torch's zip writer hides the OSError in an assertion
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        if code := code_in(file.name):
            raise CheckpointError(
                f"{path}: not saved, because loading it would run code ({code}): save plain data and tensors only"
            )


def refuse_without_data(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Refuse to save a tensor without data that is not in parts, since the file would lack it.

    Raises:
        CheckpointError: there is one.
    """
    if empty := without_data(checkpoint):
        raise CheckpointError(
            f"{path}: not saved, because {empty} has no data (device meta): on_save_checkpoint may put what is in the "
            "checkpoint into another dict or list, but not a copy of it, and not into a tuple or a set"
        )


def fault(path: Path, checksums: bool = True) -> str:
    """Return what is wrong with a file, without loading it; empty if nothing is.

    Args:
        checksums: whether to read the whole file and compare its checksums. Without them the check is fast: it finds a
            file that is cut off or holds code, but no flipped bits.
    """
    if wrong := damage(path, checksums):
        return wrong
    code = code_in(path)
    return f"refused, because it holds code, not only data: {code}" if code else ""


def damage(path: Path, checksums: bool = True) -> str:
    """Return what is wrong with a file, as `fault`, whatever its content is."""
    if path.exists() and not path.is_file() and not path.is_dir():  # reading a pipe or a device may never end
        return "not a file"
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(part.file_size for part in archive.infolist()) > path.stat().st_size:  # torch.save does not compress
                return "refused, because its parts claim to be larger than the file"
            whole = not checksums or archive.testzip() is None
    except FileNotFoundError:
        return "no such file"
    except zipfile.BadZipFile:
        return "the file is cut off, or torch.save did not write it"
    except OSError as error:
        return f"can't be read ({error.strerror})"
    except Exception:  # damage can lead to struct.error, zlib.error, RuntimeError and others
        whole = False
    return "" if whole else "the file is damaged: its checksums do not match"


def load(
    path: str | os.PathLike[str], broadcast: bool = False, tensors: bool = True, whole: bool = True
) -> dict[str, Any]:
    """Read a checkpoint of Lockstep or Lightning with `weights_only=True`, whatever the environment sets.

    Args:
        broadcast: whether rank zero reads the file and broadcasts its bytes. Then all ranks must call this.
        tensors: whether to read the tensors, and compare the file's checksums. Without them this takes milliseconds for
            a file of any size, and the tensors are mapped into memory.
        whole: whether to read also the tensors whose parts are in a folder. If not, they are stand-ins, and the entry
            `INDEX` is a `SavedParts`, which reads them.

    Raises:
        CheckpointError: the file is missing, cut off, damaged, not a checkpoint, or holds code. With `broadcast` all
            ranks raise it.
    """
    path = Path(path)
    source = checked_source(path, broadcast, partial(fault, checksums=tensors))
    checkpoint = load_plain(source, path, mapped=not tensors)
    if not isinstance(checkpoint, dict) or not {"state_dict", "pytorch-lightning_version"} <= checkpoint.keys():
        raise CheckpointError(f"{path}: not a Lockstep or Lightning checkpoint: no state_dict of a LightningModule")
    weights = checkpoint["state_dict"]
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise CheckpointError(f"{path}: not a checkpoint: its state_dict must have tensors by name")
    if isinstance(record := checkpoint.get("lockstep"), dict):
        check_format(record, path)
    find_parts(checkpoint, path, broadcast, checksums=tensors, everywhere=not whole)
    if tensors and whole:
        fill(checkpoint, path, broadcast)
    return checkpoint


def find_parts(
    content: Any, path: Path, broadcast: bool = False, checksums: bool = True, everywhere: bool = False
) -> None:
    """Replace what a file's content says about parts, if it does, by a `SavedParts`. Refuse tensors without data.

    Args:
        content: what the file has; it is changed.
        broadcast: as in `load`.
        checksums: whether to compare the checksums of the parts.
        everywhere: whether all ranks read the parts, and not rank zero alone.

    Raises:
        CheckpointError: a part is missing or damaged, or a tensor has no data. With `broadcast` all ranks raise it.
    """
    if not isinstance(content, dict) or INDEX not in content:
        try:
            empty = without_data(content)
        except RecursionError:
            raise CheckpointError(f"{path}: can't be read: it has containers in containers without end") from None
        if empty:
            raise CheckpointError(
                f"{path}: {empty} has no data, only a shape (device meta): save it again, from a model with weights"
            )
        return
    shared = broadcast and dist.is_available() and dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
    try:
        content[INDEX] = saved = SavedParts(path, content)
    except UserError as error:  # on all ranks: they have the same content
        raise CheckpointError(f"{path}: {error}") from None
    reads = everywhere or rank == 0
    wrong = saved.fault(checksums, (rank, ranks) if everywhere else (0, 1)) if reads else ""
    if wrong := next(filter(None, gather_objects(wrong) if shared else [wrong]), ""):
        raise CheckpointError(f"{path}: {wrong}")


def fill(content: Any, path: Path | str, broadcast: bool = False) -> None:
    """Read the tensors of a file's content whose parts are in a folder, one after the other.

    Args:
        content: what `find_parts` has returned; it is changed.
        path: the file.
        broadcast: as in `load`.

    Raises:
        CheckpointError: one can't be read. With `broadcast` all ranks raise it.
    """
    saved = content.pop(INDEX, None) if isinstance(content, dict) else None
    if isinstance(saved, SavedParts):
        try:
            saved.fill(content, broadcast)
        except UserError as error:
            raise CheckpointError(f"{path}: {error}") from error


def folder_of_parts(file: Path) -> str:
    """Return the name of the folder of parts that a file names; empty if it names none.

    Raises:
        CheckpointError, OSError: it can't be read.
    """
    with open(file, "rb") as opened:
        is_zipfile = zipfile.is_zipfile(opened)
    if not is_zipfile and file.suffix != ".ckpt":
        return ""
    content = load_plain(file, file, mapped=True)
    index = content.get(INDEX) if isinstance(content, dict) else None
    name = index.get("folder") if isinstance(index, dict) else None
    return name if isinstance(name, str) and FOLDER.fullmatch(name) else ""


def folders_of_parts(folder: Path) -> tuple[set[str], set[str]]:
    """Return the names of the folders of parts in a folder: of those that a file there names, and of the others.

    Both are empty if a file can't be read, since nobody knows which parts it needs.
    """
    try:
        entries = [each for each in folder.iterdir() if FOLDER.fullmatch(each.name) and not each.is_symlink()]
        folders = {each.name for each in entries if each.is_dir()}
        if not folders:
            return set(), set()
        named = {folder_of_parts(file) for file in folder.iterdir() if file.is_file()} & folders
    except (CheckpointError, OSError):
        return set(), set()
    return named, folders - named


def remove_unused_parts(folder: Path) -> None:
    """Remove the folders of parts that no checkpoint file in a folder names, as a killed process may leave them.

    Call it when a run starts: another process must not be writing to the folder.
    """
    for name in folders_of_parts(folder)[1]:
        shutil.rmtree(folder / name, ignore_errors=True)


def copy_checkpoint(source: Path, path: Path) -> None:
    """Copy a checkpoint with the folder of its parts, if it has one. The folder's files are links where possible."""
    name = folder_of_parts(source)
    if name and (source.parent / name).is_dir():  # else who reads the copy gets an error
        shutil.copytree(source.parent / name, path.parent / name, copy_function=link_file)
    shutil.copyfile(source, path)


def checked_source(path: Path, broadcast: bool = False, check: Callable[[Path], str] = fault) -> Path | IO[bytes]:
    """Check a file and return what to read: its path, or with `broadcast` the bytes that rank zero has sent.

    Args:
        broadcast: as in `load`.
        check: a function that returns what is wrong with the file; empty if nothing is.

    Raises:
        CheckpointError: something is wrong with the file. With `broadcast` all ranks raise it.
    """
    is_shared = broadcast and dist.is_available() and dist.is_initialized()
    reads_here = not is_shared or dist.get_rank() == 0
    wrong = check(path) if reads_here else ""
    if wrong := broadcast_from_rank_zero(wrong) if is_shared else wrong:
        raise CheckpointError(f"{path}: {wrong}")
    if not is_shared:
        return path
    return io.BytesIO(broadcast_file(path if reads_here else None) or b"")  # rank zero has checked that it exists


def step_of(path: Path) -> int:
    """Return the optimizer step after which a checkpoint was saved; -1 if it is missing or unusable."""
    if path.exists() and not fault(path):
        with suppress(Exception):  # a forged pickle can make torch raise anything
            content = load(path, tensors=False)
            saved = content.get(INDEX)
            return -1 if isinstance(saved, SavedParts) and saved.fault() else int(content["global_step"])
    return -1


def load_plain(source: Path | IO[bytes], path: Path, foreign: Sequence[str] = (), mapped: bool = False) -> Any:
    """Read a file of torch.save with `weights_only=True`, onto the CPU.

    Args:
        source: the file or its bytes.
        foreign: names of classes to replace by stand-ins, see `foreign_files.load`.
        mapped: whether the tensors of a file are mapped into memory instead of being read.

    Raises:
        CheckpointError: the file can't be loaded.
    """
    try:
        return foreign_files.load(source, foreign, mapped)
    except Exception as error:  # a forged pickle can make torch raise anything
        details = str(error).rpartition("WeightsUnpickler error: ")[2].strip()  # torch's advice comes before it
        reason = (details or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path}: can't be loaded as plain data and tensors ({reason[:120]})") from error


def copied_to_cpu(state: Any) -> tuple[Any, Callable[[], None]]:
    """Copy the tensors of a nested container to the CPU.

    A GPU copies into page-locked memory, after its earlier and before its later work. So the caller need not wait: what
    changes the tensors later does not change the copy.

    Returns:
        The copy, and a function that waits until a GPU has completed it. Don't read the copy before.
    """
    devices: set[torch.device] = set()

    def copied(tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            devices.add(tensor.device)
        return tensor if tensor.is_meta else tensor.detach().to("cpu", copy=True, non_blocking=tensor.is_cuda)

    copy = apply_to_collection(state, Tensor, copied)
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return copy, wait


class AtomicCheckpointIO(CheckpointIO):
    """`save` and `load` as a plugin of Lightning's Trainer.

    A thread writes a copy of the state while training continues. One file is written at a time, in the order of the
    calls. An error of the thread is raised by the next call, at the latest at the end of the Trainer's `fit`.

    A run survives the loss of any machine, because on each machine that does not see the run's folder, one rank keeps
    last.ckpt and best.ckpt in a folder of the same name. The threads of these ranks send and receive them while
    training runs its own collectives, so they have a separate process group. All ranks must create it.

    Args:
        observers: objects that see each checkpoint, in the thread that writes it.
        last: the run's last checkpoint.
        number: how many additional checkpoints to keep of it (see `keep_step_checkpoint`).
        ranks: rank zero and the ranks that keep copies.
        timeout: seconds that ranks wait for each other to send a copy, or to write their parts; then the write fails.
        loaded: see the attribute.

    Attributes:
        loaded: the content of the checkpoint from which the run continues, which the next `load_checkpoint` returns;
            None: it reads the file.
        loaded_step: the optimizer step of the checkpoint that was loaded last.
        keeps_copies: whether this rank writes copies of rank zero's files.
        has_copies: whether any rank does, since its machine does not see the run's folder.
        removals: the files to remove after saves that have not begun; None: none wait.
    """

    def __init__(
        self,
        observers: Sequence[CheckpointObserver] = (),
        last: Path | None = None,
        number: int = 0,
        ranks: Sequence[int] = (0,),
        timeout: float = 300.0,
        loaded: dict[str, Any] | None = None,
    ) -> None:
        self._observers, self.loaded = observers, loaded
        self._last, self._number = last, number
        self._timeout = timedelta(seconds=timeout)
        self._group = dist.new_group(list(ranks), self._timeout, "gloo") if len(ranks) > 1 else None
        self.keeps_copies = self._group is not None and dist.get_rank() in ranks[1:]
        self._group_of_parts: Any = None  # of all ranks; made when the first parts are saved
        self.has_copies = len(ranks) > 1  # on other machines
        self._named_parts: dict[Path, set[str]] = {}  # by folder: the folders of parts that its files have named
        self._writer: ThreadPoolExecutor | None = None  # made when there is something to write
        self._pending: list[Future[None]] = []
        self.loaded_step: int | None = None
        self.removals: list[Path] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of the Trainer needs: it has a thread of its own, and nothing that waits to be written."""
        self.wait()
        return {**self.__dict__, "_writer": None, "loaded": None}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        self.wait()  # so that memory holds one copy of the state at most
        if self.keeps_copies:
            self.then(self._receive, Path(path))
            return
        self.then(self._write, *self.copied(checkpoint), Path(path))

    def save_parts(
        self, checkpoint: dict[str, Any], parts: Sequence[tuple[Tensor, Tensor, Sequence[int]]], path: str | Path
    ) -> None:
        """Save a checkpoint of which each rank has parts. All ranks call this.

        The parts are in a new folder beside the file, whose name is in the file. So the earlier checkpoint is complete
        until the file is replaced.

        Args:
            checkpoint: the content, with stand-ins for the tensors of the parts. Rank zero writes its own.
            parts: of each part of this rank the stand-in, its elements in the order of a contiguous tensor, and where
                it begins in the whole tensor, along each dimension.
            path: the file.
        """
        self.wait()
        if self._group_of_parts is None:
            self._group_of_parts = dist.new_group(timeout=self._timeout, backend="gloo")
        folder = Path(path).with_name(broadcast_from_rank_zero(new_folder_name()))
        content = self.copied(checkpoint) if dist.get_rank() == 0 else None
        by_id = {id(part[0]): part for part in parts}
        named = {name: by_id[id(value)] for name, *_, value in tensors_in(checkpoint) if id(value) in by_id}
        tensors, wait = copied_to_cpu({name: tensor for name, (_, tensor, _) in named.items()})
        copies = {name: Part(tensors[name], begin, whole.shape) for name, (whole, _, begin) in named.items()}
        self.then(self._write_parts, folder, copies, wait, content, Path(path))

    def copied(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
        """Return a copy of what is saved of a checkpoint, and a function that waits for it; see `copied_to_cpu`."""
        checkpoint = with_plain_hyperparameters(checkpoint)
        copy, wait = copied_to_cpu(checkpoint)
        if (metadata := getattr(checkpoint["state_dict"], "_metadata", None)) is not None:
            copy["state_dict"]._metadata = metadata  # versions of layers, which some torchvision layers read
        return copy, wait

    def then(self, task: Callable[..., None], *args: Any) -> None:
        """Call a task in the writer thread, after the earlier tasks and only if they succeed."""
        before = self._pending[-1] if self._pending else None

        def work() -> None:
            if before is not None:
                before.result()
            task(*args)

        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending.append(self._writer.submit(work))

    def _write_parts(
        self,
        folder: Path,
        parts: Mapping[str, Part],
        wait: Callable[[], None],
        content: tuple[dict[str, Any], Callable[[], None]] | None,
        path: Path,
    ) -> None:
        """Write the parts of this rank. Then rank zero writes the file that names them."""
        from lockstep.checkpoint.part_files import write_parts

        wait()
        try:
            index = write_parts(folder, parts, self._group_of_parts)
            if content is None:
                return
            checkpoint, wait_for_content = content
            saved = {**checkpoint, INDEX: index}
            refuse_without_data(saved, path)
            SavedParts(path, saved)  # it raises an error if the file could not be read
        except Exception:
            if content is not None:  # this is rank zero; another rank must not remove what it may publish
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self._note_parts(path.parent)
        self._named_parts[path.parent].add(folder.name)
        self._write(saved, wait_for_content, path)

    def _write(self, checkpoint: dict[str, Any], wait: Callable[[], None], path: Path) -> None:
        written = None
        try:
            self._note_parts(path.parent)
            wait()
            for observer in self._observers:
                observer.before_write(checkpoint)
            save(checkpoint, path)
            written = path
        finally:
            if self._group is not None:
                broadcast_file(written, 0, self._group)  # None: the file could not be written
        for observer in self._observers:
            observer.after_write()
        if self._number and self._last is not None and path.absolute() == self._last.absolute():
            keep_step_checkpoint(path, checkpoint["global_step"], self._number)
        self._remove_parts(path.parent)

    def _note_parts(self, folder: Path) -> None:
        """Note which folders of parts the files in a folder name, before one of them is replaced or removed."""
        if folder not in self._named_parts:
            self._named_parts[folder] = folders_of_parts(folder)[0]

    def _remove_parts(self, folder: Path) -> None:
        """Remove the folders of parts that no file names any more.

        One that no file has named yet may be that of another run, which writes to the same folder.
        """
        named, others = folders_of_parts(folder)
        self._named_parts[folder] |= named
        for name in self._named_parts[folder] & others:
            shutil.rmtree(folder / name, ignore_errors=True)

    def _receive(self, path: Path) -> None:
        """Write the next file that rank zero sends."""
        content = broadcast_file(None, 0, self._group)
        if content is not None:
            write(path, content)

    def wait(self) -> None:
        """Wait until all files are on the disk.

        Raises:
            OSError: as in `save`.
            CheckpointError: as in `save`.
        """
        pending, self._pending = self._pending, []
        for task in pending:
            task.result()

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = self._load(path, whole=True)
        fill(checkpoint, path, broadcast=True)  # `loaded` may lack tensors
        return checkpoint

    def load_parts(self, path: str | Path) -> dict[str, Any]:
        """Return a checkpoint with stand-ins for tensors whose parts are in a folder; see `load`."""
        return self._load(path, whole=False)

    @staticmethod
    def saved_parts(checkpoint: Mapping[str, Any]) -> SavedParts | None:
        """Return what reads the tensors that stand-ins of a checkpoint stand for; None: it has none."""
        saved = checkpoint.get(INDEX)
        return saved if isinstance(saved, SavedParts) else None

    def _load(self, path: str | Path, whole: bool) -> dict[str, Any]:
        self.wait()  # the file may be one that is being written
        self._note_parts(Path(path).parent)
        loaded, self.loaded = self.loaded, None  # it is large, so drop the reference
        checkpoint = load(path, broadcast=True, whole=whole) if loaded is None else loaded
        self.loaded_step = checkpoint.get("global_step")
        return checkpoint

    def link_checkpoint(self, source: Path, path: Path) -> None:
        """Make `path` a link to a checkpoint, see `link_file`: when the earlier writes are complete."""
        self.then(self._link, source, path)

    def _link(self, source: Path, path: Path) -> None:
        self._note_parts(path.parent)
        link_file(source, path)
        self._remove_parts(path.parent)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint: when the earlier writes are complete, since one of them may replace it.

        If `removals` is a list, the file is added to it.
        """
        if self.removals is not None:
            self.removals.append(Path(path))
        elif self._pending:
            self.then(self._remove, Path(path))
        else:
            self._remove(Path(path))

    def _remove(self, path: Path) -> None:
        self._note_parts(path.parent)
        path.unlink(missing_ok=True)
        self._remove_parts(path.parent)

    def teardown(self) -> None:
        """End the thread when all files are on the disk. A later call makes another."""
        writer, self._writer = self._writer, None
        try:
            self.wait()
        finally:
            if writer is not None:
                writer.shutdown()


def keep_step_checkpoint(last: Path, step: int, number: int) -> None:
    """Keep the file of `last` under the name `step_<n>.ckpt`, and remove older such files.

    Files of later steps are removed too: a run that went back to an earlier step writes them again.

    Args:
        last: the path of the last checkpoint.
        step: the optimizer step after which it was saved.
        number: how many of these files to keep; -1: all.
    """
    link_file(last, paths.step_path(last.parent, step))
    step_files = paths.step_checkpoints(last.parent)
    upto = [each for each in step_files if each <= step]
    for removed in step_files.keys() - set(upto if number < 0 else upto[-number:]):
        step_files[removed].unlink()


def weights_in_use(trainer: Any) -> tuple[str | None, int | None]:
    """Return the checkpoint file of an evaluation's weights, and their optimizer step.

    The file is None if the weights are those of a training that has just ended.
    """
    path = trainer.ckpt_path
    return (None, trainer.global_step) if path is None else (str(path), trainer.strategy.checkpoint_io.loaded_step)
