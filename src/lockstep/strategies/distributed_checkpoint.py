"""Write and read the parts of tensors by torch's distributed checkpoint; see `saved_parts.py`.

torch writes an index of its own, `.metadata`, so that its programs can read the folder. It is a pickle, which may run
code. So this module never reads it, and takes what it needs from the checkpoint file.

The imports take a tenth of a second, so import this module where it is used.
"""

import io
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lockstep.errors import UserError
from lockstep.files import sync_folder
from lockstep.launch.process_group import gather_objects
from lockstep.strategies.saved_parts import WRONG, Part, SavedPart
from lockstep.text import first_line


class _Writer(dcp.FileSystemWriter):
    """Raises the error of the file system, which torch's zip writer replaces by one of its own."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


class _PartsToSave(SavePlanner):
    """Gives torch's writer the parts of this process."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = parts

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: the parts are those of the constructor."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(name, part) for name, part in self._parts.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._parts[write_item.index.fqn].tensor


def _write_item(name: str, part: Part) -> WriteItem:
    offsets = torch.Size(part.offsets)
    properties = TensorProperties(dtype=part.tensor.dtype)
    chunk = ChunkStorageMetadata(offsets, part.tensor.shape)
    data = TensorWriteData(chunk, properties, torch.Size(part.shape))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def write_parts(folder: Path, parts: Mapping[str, Part], group: Any) -> dict[str, Any]:
    """Write the parts of all processes to a new folder. Every process of the group calls this.

    Args:
        folder: it is complete on the disk on return.
        parts: those of this process, by the names of the tensors; in the host's memory.
        group: the process group, of gloo.

    Returns:
        The index, as plain data.

    Raises:
        OSError: a process can't write its parts. All processes raise it.
    """
    parts = {name: part for name, part in parts.items() if part.tensor.numel()}
    writer = _Writer(folder, per_thread_copy_ahead=0)  # the parts are in the host's memory: torch must start no GPU
    try:
        metadata = dcp.save({}, storage_writer=writer, planner=_PartsToSave(parts), process_group=group)
    except CheckpointException as error:
        reasons = {rank: reason for rank, (reason, _) in error.failures.items()}
        raise _failure(folder, reasons) from None
    storage: Any = metadata.storage_data
    mine: Any = []
    try:
        for name, part in parts.items():
            place = storage[MetadataIndex(name, part.offsets)]
            with open(folder / place.relative_path, "rb") as file:
                file.seek(place.offset)
                checksum = zlib.crc32(file.read(place.length))
            sizes = list(part.tensor.shape)
            mine.append((name, [list(part.offsets), sizes, place.relative_path, place.offset, place.length, checksum]))
        sync_folder(folder)
    except OSError as error:
        mine = error
    everyone = gather_objects(mine, group)
    if reasons := {rank: each for rank, each in enumerate(everyone) if isinstance(each, OSError)}:
        raise _failure(folder, reasons)
    tensors: dict[str, list[Any]] = {}
    for name, part in sorted(item for each in everyone for item in each):
        tensors.setdefault(name, []).append(part)
    return {"folder": folder.name, "tensors": tensors}


def _failure(folder: Path, reasons: Mapping[int, BaseException]) -> Exception:
    """Return the error of the first process that could not write."""
    rank, reason = min(reasons.items())
    if isinstance(reason, OSError):
        return type(reason)(reason.errno, f"rank {rank} can't write its parts ({reason.strerror})", str(folder))
    return RuntimeError(f"{folder}: rank {rank} can't write its parts ({type(reason).__name__}: {first_line(reason)})")


class _Target(LoadPlanner):
    """Lets torch's reader fill a tensor.

    Args:
        items: what is read.
        tensor: it is changed.
    """

    def __init__(self, items: list[ReadItem], tensor: Tensor) -> None:
        self._items, self._tensor = items, tensor

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: the tensor is that of the constructor."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self._items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise UserError(WRONG)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._tensor
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, offset, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the tensor is complete."""


def read_region(
    folder: Path, name: str, shape: torch.Size, parts: Sequence[SavedPart], offsets: Sequence[int], tensor: Tensor
) -> None:
    """Fill a tensor with a region of a saved one, by reading the parts that have some of it.

    Args:
        folder: the folder of the parts.
        name: the name of the saved tensor.
        shape: its shape.
        parts: its parts.
        offsets: where the region begins in it, along each dimension.
        tensor: it is changed.
    """
    chunks = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in parts]
    about = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), shape, chunks)
    region = ChunkStorageMetadata(torch.Size(offsets), tensor.shape)
    items = create_read_items_for_chunk_list(name, about, [region]) if tensor.numel() else []
    planner, reader = _Target(items, tensor), dcp.FileSystemReader(folder)
    storage = {MetadataIndex(name, each.offsets): each for each in parts}
    reader.set_up_storage_reader(Metadata({name: about}, storage_data=storage), is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
