"""Tensors of a checkpoint of which each process has written a part, by torch's distributed checkpoint.

A checkpoint file has a folder of these parts beside it. In place of each tensor whose parts are in the folder, the file
has a tensor of the same shape without data (torch's device `meta`), called a stand-in. An index in the file names the
folder, and says where in it each part is, with its checksum.
"""

import io
import os
import re
import uuid
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UserError
from lockstep.launch.process_group import broadcast_from_rank_zero
from lockstep.text import first_line

INDEX = "lockstep_parts"  # the key of the index in a checkpoint file
FOLDER = re.compile(r"parts-[0-9a-f]{32}")  # the folders' names
CONTAINERS = dict | list | tuple | set | frozenset
WRONG = "its index of parts is not as this version writes it"


class Part(NamedTuple):
    """A part of a tensor, to be written.

    Attributes:
        tensor: the elements, in the order of a contiguous tensor.
        offsets: where the part begins in the whole tensor, along each dimension.
        shape: of the whole tensor.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class SavedPart(NamedTuple):
    """Where a part is in a folder.

    Attributes:
        offsets: where it begins in the whole tensor, along each dimension.
        sizes: its shape.
        relative_path: the name of its file.
        offset: where it begins in the file, in bytes.
        length: how many bytes it has there.
        checksum: their CRC-32.
    """

    offsets: list[int]
    sizes: list[int]
    relative_path: str
    offset: int
    length: int
    checksum: int

    @property
    def transform_descriptors(self) -> None:
        """Return None, since the bytes are not encoded; torch's reader asks for it."""


def new_folder_name() -> str:
    """Return a name that no other folder of parts has."""
    return f"parts-{uuid.uuid4().hex}"


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def tensors_in(content: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Yield the tensors in nested containers: the keys that lead to each, its container and key there, and it.

    Args:
        content: the outermost container.
        path: the keys that lead to it.
        seen: ids of containers to leave out; it is changed, so each is searched once. None: at each of its places.
    """
    if not isinstance(content, CONTAINERS) or (seen is not None and id(content) in seen):
        return
    if seen is not None:
        seen.add(id(content))
    for key, value in list(content.items() if isinstance(content, dict) else enumerate(content)):
        if isinstance(value, Tensor | CONTAINERS):  # most values are neither, and need no path
            place = f"{path}/{key}" if path else str(key)
            if isinstance(value, Tensor):
                yield place, content, key, value
            else:
                yield from tensors_in(value, place, seen)


def without_data(content: Any) -> str:
    """Return the keys that lead to a tensor without data that is no stand-in; empty if there is none.

    A stand-in is named by the index, and it is in a dict or a list, where a whole tensor can replace it.
    """
    names = set(content[INDEX]["tensors"]) if isinstance(content, dict) and INDEX in content else set()
    for path, container, _, value in tensors_in(content, seen=set()):
        if value.is_meta:
            if path not in names or not isinstance(container, dict | list):
                return path
            names.remove(path)  # the keys of two tensors may read alike
    return ""


class SavedParts:
    """The tensors of a checkpoint file whose parts are in a folder.

    Args:
        file: the checkpoint's file.
        content: what it has.

    Raises:
        UserError: its index is damaged or forged.
    """

    def __init__(self, file: Path, content: dict[str, Any]) -> None:
        try:
            index = content[INDEX]
            name = index["folder"]
            self._parts = {key: [SavedPart(*each) for each in parts] for key, parts in index["tensors"].items()}
            stand_ins = {path: value for path, *_, value in tensors_in(content, seen=set()) if value.is_meta}
            fits = FOLDER.fullmatch(name) is not None and stand_ins.keys() == self._parts.keys()
            fits = fits and not without_data(content)
            fits = fits and all(_fits(value, self._parts[path]) for path, value in stand_ins.items())
            self._ends: dict[str, int] = {}  # of the last part in each file
            parts = [each for parts in self._parts.values() for each in parts]
            for part in sorted(parts, key=lambda part: (part.relative_path, part.offset)):
                fits = fits and part.offset >= self._ends.get(part.relative_path, 0)  # else two have the same bytes
                self._ends[part.relative_path] = part.offset + part.length
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError):
            fits = False
        if not fits:
            raise UserError(WRONG)
        self._folder = file.parent / name
        self._names = {id(value): path for path, value in stand_ins.items()}
        self._stand_ins = stand_ins  # so that no other tensor gets the id of one

    def has(self, value: Any) -> bool:
        """Check whether a value is a stand-in."""
        return id(value) in self._names

    def fault(self, checksums: bool = True, share: tuple[int, int] = (0, 1)) -> str:
        """Return what is wrong with the folder; empty if nothing is.

        Args:
            checksums: whether to read the parts and compare their checksums.
            share: number of this process and of all: each reads other parts.
        """
        number, processes = share
        parts = [each for parts in self._parts.values() for each in parts]
        here = f"{self._folder.name}, the folder of its parts"
        try:
            for name, end in self._ends.items():
                if (self._folder / name).stat().st_size < end:
                    return f"{here}: {name} is cut off"
            for part in parts[number::processes] if checksums else ():
                with open(self._folder / part.relative_path, "rb") as file:
                    file.seek(part.offset)
                    content = file.read(part.length)
                if zlib.crc32(content) != part.checksum:
                    return f"{here}: {part.relative_path} is damaged: its checksums do not match"
                with zipfile.ZipFile(io.BytesIO(content)) as archive:
                    if sum(each.file_size for each in archive.infolist()) > part.length:
                        return f"{here}: {part.relative_path} claims to be larger than it is"
        except FileNotFoundError as error:
            missing = Path(error.filename).name if self._folder.is_dir() else "all of it"
            return f"{here}, lacks {missing}: it must be beside the file"
        except OSError as error:
            return f"{here}: can't be read ({error.strerror})"
        except Exception as error:  # a forged zip file can make the reader raise anything
            return f"{here}: is damaged ({type(error).__name__})"
        return ""

    def read(self, value: Tensor, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return a tensor, contiguous and in the host's memory.

        Args:
            value: its stand-in.
            offsets: where the region to read begins, along each dimension; None: the whole tensor.
            sizes: the shape of the region.

        Raises:
            UserError: it can't be read.
        """
        from lockstep.strategies.distributed_checkpoint import read_region

        name = self._names[id(value)]
        try:
            tensor = torch.zeros(value.shape if sizes is None else sizes, dtype=value.dtype)
            read_region(self._folder, name, value.shape, self._parts[name], offsets or [0] * value.dim(), tensor)
        except Exception as error:  # a forged part can make torch raise anything
            raise UserError(
                f"{self._folder.name}: {name} can't be read ({type(error).__name__}: {first_line(error)})"
            ) from error
        return tensor

    def fill(self, content: Any, broadcast: bool = False) -> None:
        """Replace the stand-ins in nested dicts and lists by whole tensors, one after the other.

        Args:
            content: it is changed.
            broadcast: whether rank zero reads and sends them. Then all ranks call this.

        Raises:
            UserError: one can't be read. With `broadcast` all ranks raise it.
        """
        sends = broadcast and dist.is_available() and dist.is_initialized()
        reads = not sends or dist.get_rank() == 0
        for _, container, key, value in tensors_in(content, seen=set()):
            if not self.has(value):
                continue
            wrong = ""
            try:
                tensor = self.read(value) if reads else torch.empty(value.shape, dtype=value.dtype)
            except UserError as error:
                wrong = str(error)
            if wrong := broadcast_from_rank_zero(wrong) if sends else wrong:
                raise UserError(wrong)
            if sends:
                dist.broadcast(tensor.view(-1).view(torch.uint8), 0)
            container[key] = tensor


def _is_name(name: Any) -> bool:
    """Check that a value is the name of a file, and no path."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", os.sep, "\0"}


def _fits(value: Tensor, parts: Sequence[SavedPart]) -> bool:
    """Check that parts follow each other along one dimension of a tensor, and that their files can have as much."""
    for part in parts:
        numbers = [*part.offsets, *part.sizes, part.offset, part.length, part.checksum]
        if not all(type(each) is int and each >= 0 for each in numbers) or not _is_name(part.relative_path):
            return False
        if not len(part.offsets) == len(part.sizes) == value.dim():
            return False
        if not 0 < prod(part.sizes) * value.element_size() <= part.length:
            return False
    cut = {dim for part in parts for dim, size in enumerate(part.sizes) if size != value.shape[dim]}
    if not cut:
        return len(parts) == 1 and not any(parts[0].offsets)
    dim, end = min(cut), 0
    for part in sorted(parts, key=lambda part: part.offsets[dim]):
        before = [end if each == dim else 0 for each in range(value.dim())]
        if list(part.offsets) != before:
            return False
        end += part.sizes[dim]
    return len(cut) == 1 and end == value.shape[dim]
