"""Write and read the parts of tensors by torch's distributed checkpoint, as safetensors; see `parts.py`.

There is no index and no pickle: the header of each file says which part of which tensor it has, and torch's reader
puts the headers together. Other programs read such a folder by torch's HuggingFaceStorageReader.

The imports take a tenth of a second, so import this module where it is used.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lockstep.checkpoint.parts import Part, sha256_of
from lockstep.files import sync_folder
from lockstep.launch.process_group import gather_objects
from lockstep.text import first_line

FILE_SIZE = 1 << 27  # bytes of a file, about: torch's writer has a file twice more in memory


class _Writer(HuggingFaceStorageWriter):
    """Computes the SHA-256 of the files that this process writes."""

    sha256: dict[str, str]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        written = super().write_data(plan, planner)
        names = {each.storage_data.relative_path for each in written.value()}
        self.sha256 = {name: sha256_of(Path(self.path, name)) for name in names}
        sync_folder(Path(self.path))
        return written


class _PartsToSave(DefaultSavePlanner):
    """Gives torch's writer the parts of this process."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, part) for name, part in self._parts.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn].tensor


def _write_item(name: str, part: Part) -> WriteItem:
    offsets = torch.Size(part.offsets)
    properties = TensorProperties(dtype=part.tensor.dtype)
    chunk = ChunkStorageMetadata(offsets, part.tensor.shape)
    data = TensorWriteData(chunk, properties, part.shape)
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def write_parts(folder: Path, parts: Mapping[str, Part], group: Any) -> dict[str, Any]:
    """Write the parts of all processes to a new folder. Every process of the group calls this.

    Args:
        folder: it is complete on the disk on return.
        parts: those of this process, by the names of the tensors; in the host's memory.
        group: the process group, of gloo.

    Returns:
        What the checkpoint file has of them, as plain data.

    Raises:
        OSError: a process can't write its parts. All processes raise it.
    """
    parts = {name: part for name, part in parts.items() if part.tensor.numel()}
    sizes: dict[str, int] = {}
    for of_rank in gather_objects({name: part.tensor.nbytes for name, part in parts.items()}, group):
        sizes |= {name: max(size, sizes.get(name, 0)) for name, size in of_rank.items()}
    writer = _Writer(str(folder), _files(sizes), save_distributed=True)
    writer.per_thread_copy_ahead = 0  # the parts are in the host's memory: torch must start no GPU
    try:
        dcp.save({}, storage_writer=writer, planner=_PartsToSave(parts), process_group=group)
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        wrong = f"rank {rank} can't write its parts"
        if isinstance(reason, OSError):
            raise type(reason)(reason.errno, f"{wrong} ({reason.strerror})", str(folder)) from None
        raise RuntimeError(f"{folder}: {wrong} ({type(reason).__name__}: {first_line(reason)})") from None
    sha256 = {name: each for of_rank in gather_objects(writer.sha256, group) for name, each in of_rank.items()}
    return {"folder": folder.name, "sha256": sha256, "tensors": sorted(sizes)}


def _files(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the number of the file, from 1 on, that each process writes a tensor to."""
    files, total = {}, 0
    for name, size in sizes.items():
        files[name] = 1 + total // FILE_SIZE
        total += size
    return files


def read_metadata(folder: Path) -> Metadata:
    """Return where each part is, from the headers of the files."""
    return HuggingFaceStorageReader(str(folder)).read_metadata()


class _Region(DefaultLoadPlanner):
    """Lets torch's reader fill a tensor.

    Args:
        tensor: it is changed.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._tensor


def read_region(folder: Path, metadata: Metadata, name: str, offsets: Sequence[int], tensor: Tensor) -> None:
    """Fill a tensor with a region of a saved one, by reading the parts that have some of it.

    Args:
        folder: the folder of the parts.
        metadata: see `read_metadata`.
        name: the name of the saved tensor.
        offsets: where the region begins in it, along each dimension.
        tensor: it is changed.
    """
    if not tensor.numel():
        return
    region = ChunkStorageMetadata(torch.Size(offsets), tensor.shape)
    about: Any = metadata.state_dict_metadata[name]
    items = create_read_items_for_chunk_list(name, about, [region])
    if sum(prod(item.lengths) for item in items) != tensor.numel():
        raise ValueError("the parts do not fill it")
    reader = HuggingFaceStorageReader(str(folder))
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(LoadPlan(items), _Region(tensor)).wait()
