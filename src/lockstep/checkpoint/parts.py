"""Tensors of a checkpoint of which each process has written a part, in files of safetensors.

A checkpoint file has a folder of these files beside it, as torch's distributed checkpoint writes them; see
`part_files.py`. In place of each tensor whose parts are in the folder, the file has a tensor of the same shape without
data (torch's device `meta`), called a stand-in. The file names the folder, and has a SHA-256 of each file there, since
torch would read a flipped byte in silence.
"""

import hashlib
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UserError
from lockstep.launch.process_group import broadcast_from_rank_zero
from lockstep.text import first_line

INDEX = "lockstep_parts"  # the key of a checkpoint file for what it says about its parts
FOLDER = re.compile(r"parts-[0-9a-f]{32}")  # the folders' names
SUFFIX = ".safetensors"
CONTAINERS = dict | list | tuple | set | frozenset


class Part(NamedTuple):
    """A part of a tensor, to be written.

    Attributes:
        tensor: the elements, in the order of a contiguous tensor.
        offsets: where the part begins in the whole tensor, along each dimension.
        shape: of the whole tensor.
    """

    tensor: Tensor
    offsets: Sequence[int]
    shape: torch.Size


def new_folder_name() -> str:
    """Return a name that no other folder of parts has."""
    return f"parts-{uuid.uuid4().hex}"


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


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

    A stand-in is named by the file, and it is in a dict or a list, where a whole tensor can replace it.
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
        UserError: what it says about its parts is damaged or forged.
    """

    def __init__(self, file: Path, content: dict[str, Any]) -> None:
        try:
            index = content[INDEX]
            name, self._sha256 = index["folder"], dict(index["sha256"])
            self._stand_ins = {path: value for path, *_, value in tensors_in(content, seen=set()) if value.is_meta}
            fits = FOLDER.fullmatch(name) is not None and all(map(_is_name, self._sha256)) and bool(self._sha256)
            fits = fits and self._stand_ins.keys() == set(index["tensors"]) and not without_data(content)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            fits = False
        if not fits:
            raise UserError("what it says about its parts is not as this version writes it")
        self._folder = file.parent / name
        self._names = {id(value): path for path, value in self._stand_ins.items()}
        self._metadata: Any = None  # of torch: where each part is

    def has(self, value: Any) -> bool:
        """Check whether a value is a stand-in."""
        return id(value) in self._names

    def fault(self, checksums: bool = True, share: tuple[int, int] = (0, 1)) -> str:
        """Return what is wrong with the folder; empty if nothing is.

        Args:
            checksums: whether to read the files and compare their SHA-256.
            share: number of this process and of all: each reads other files.
        """
        number, processes = share
        here = f"{self._folder.name}, the folder of its parts"
        if not self._folder.is_dir():
            return f"{here}, lacks all of it: it must be beside the file"
        try:
            for name in sorted(self._sha256):
                if not (self._folder / name).is_file():
                    return f"{here}, lacks {name}: it must be beside the file"
            for file in sorted(self._folder.iterdir()):  # torch reads each file of safetensors
                if file.suffix == SUFFIX and file.name not in self._sha256:
                    return f"{here}, has {file.name}, which is no part of it: move it elsewhere"
            if wrong := self._damage(sorted(self._sha256)[number::processes] if checksums else ()):
                return f"{here}: {wrong}"
            try:
                return "" if self._has_tensors() else f"{here}: has other tensors than the file"
            except Exception as error:  # a file that another process checks, or a forged one
                return f"{here}: {self._damage(sorted(self._sha256)) or f'is damaged ({type(error).__name__})'}"
        except OSError as error:
            return f"{here}: can't be read ({error.strerror})"

    def _damage(self, names: Iterable[str]) -> str:
        """Return which of the folder's files is damaged; empty if none is."""
        for name in names:
            if sha256_of(self._folder / name) != self._sha256[name]:
                return f"{name} is damaged, or is another file: its SHA-256 does not match"
        return ""

    def _has_tensors(self) -> bool:
        """Check whether the folder has parts of each stand-in, with as many elements, and of nothing else."""
        saved = self._where().state_dict_metadata
        return saved.keys() == self._stand_ins.keys() and all(
            (saved[name].size, saved[name].properties.dtype) == (value.shape, value.dtype)
            and sum(prod(chunk.sizes) for chunk in saved[name].chunks) == value.numel()
            for name, value in self._stand_ins.items()
        )

    def _where(self) -> Any:
        from lockstep.checkpoint.part_files import read_metadata

        self._metadata = self._metadata or read_metadata(self._folder)
        return self._metadata

    def read(self, value: Tensor, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return a tensor, contiguous and in the host's memory.

        Args:
            value: its stand-in.
            offsets: where the region to read begins, along each dimension; None: the whole tensor.
            sizes: the shape of the region.

        Raises:
            UserError: it can't be read.
        """
        from lockstep.checkpoint.part_files import read_region

        name = self._names[id(value)]
        try:
            tensor = torch.zeros(value.shape if sizes is None else sizes, dtype=value.dtype)
            read_region(self._folder, self._where(), name, offsets or [0] * value.dim(), tensor)
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
    """Check that a value is the name of a file of safetensors, and no path."""
    return isinstance(name, str) and name.endswith(SUFFIX) and not set(name) & {"/", os.sep, "\0"}
