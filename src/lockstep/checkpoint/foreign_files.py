"""Read weights out of a file that also holds objects of other programs. None of their code is imported or called.

`torch.load` reads with `weights_only=True`, and each class in the file that it does not take is replaced by a stand-in:
an empty class of this file, which ignores whatever the file does with it.
"""

import io
import pickletools
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

# Parts of the standard library whose classes hold data. A file that names another part, such as `os`, is refused.
DATA_MODULES = (
    *("argparse", "array", "calendar", "collections", "copyreg", "dataclasses", "datetime", "decimal", "enum"),
    *("fractions", "functools", "logging", "numbers", "pathlib", "random", "re", "typing", "uuid", "zoneinfo"),
)
DATA_NAMES = (
    *("types.SimpleNamespace", "types.MappingProxyType", "builtins.object", "builtins.dict", "builtins.list"),
    *("builtins.tuple", "builtins.frozenset", "builtins.str", "builtins.int", "builtins.float", "builtins.bool"),
    *("builtins.bytes", "builtins.slice", "builtins.range", "builtins.type"),
)
OLD_LIBRARY = {"commands", "cPickle", "urllib2"}  # subprocess, pickle and urllib in pickles of protocol 2
PICKLES_BEFORE_TENSORS = 4  # of torch's older format: a number, the protocol, the system, the content


class _EqualsDict(type):
    """The type of stand-ins. They equal `dict`, because torch puts items only into objects of a type in [dict, ...]."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is dict

    def __hash__(cls) -> int:
        return id(cls)


class StandIn(dict[Any, Any], metaclass=_EqualsDict):
    """Stands for an object of another program's class. It has the items that the object has as a dict, nothing else."""

    __slots__ = ()
    name = ""  # of the class that it stands for

    def __new__(cls, *args: Any, **kwargs: Any) -> "StandIn":
        return dict.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the arguments."""

    def __setstate__(self, state: Any) -> None:
        """Ignore the attributes."""


def foreign_names(source: Path | IO[bytes]) -> list[str]:
    """Return the names of the classes and functions in a file that `weights_only=True` does not take, in order.

    Nothing is executed. The result is empty if the file can't be read; `torch.load` then raises an error.
    """
    if isinstance(source, Path):
        with open(source, "rb") as file:
            return foreign_names(file)
    names: set[str] = set()
    with suppress(Exception):  # a forged file can make the readers raise anything
        source.seek(0)
        is_zip = source.read(4) == b"PK\x03\x04"
        source.seek(0)
        for part in [source] if is_zip else _as_zip_files(source):
            names |= set(torch.serialization.get_unsafe_globals_in_checkpoint(part))
    source.seek(0)
    return sorted(names)


def _as_zip_files(source: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield each pickle of a file in torch's older format as a file of the newer one, without tensors."""
    for _ in range(PICKLES_BEFORE_TENSORS):
        begin = source.tell()
        for _ in pickletools.genops(source):
            pass
        end = source.tell()
        source.seek(begin)
        with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
            archive.writestr("archive/data.pkl", source.read(end - begin))
            archive.writestr("archive/version", "3")
        file.seek(0)
        yield file


def _stand_in(of: str) -> type[StandIn]:
    """Return a new class of stand-ins for the class or function with the name `of`."""

    class Kind(StandIn):
        __slots__ = ()
        name = of

    return Kind


def load(source: Path | IO[bytes], names: Sequence[str], mapped: bool = False) -> Any:
    """Return the content of a file of torch.save, on the CPU, with stand-ins for the classes and functions `names`.

    Args:
        mapped: whether the tensors of a file are mapped into memory instead of being read.
    """
    if isinstance(source, Path) and source.suffix == ".safetensors":  # torch would go by the name
        with open(source, "rb") as file:
            return load(file, names)
    kinds: list[Any] = [(_stand_in(name), name) for name in names]
    with torch.serialization.safe_globals(kinds):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped and isinstance(source, Path))


def names_of_code(names: Sequence[str]) -> list[str]:
    """Return those of `names` that no data need: functions and classes of the standard library that act."""
    library = sys.stdlib_module_names | OLD_LIBRARY
    tops = {name: name.partition(".")[0] for name in names}
    return [name for name, top in tops.items() if top in library and top not in DATA_MODULES and name not in DATA_NAMES]


# --- what a file is that torch.save did not write ---

STARTS = {
    b"version https://git-lfs": "a pointer of git-lfs, not the file: run `git lfs pull`",
    b"\x93NUMPY": "an array of numpy: save a state_dict by torch.save",
    b"\x89HDF": "an HDF5 file, as Keras writes it: save a state_dict by torch.save",
    b"GGUF": "a GGUF file: save a state_dict by torch.save",
    b"\x1f\x8b": "compressed by gzip: unpack it",
    b"BZh": "compressed by bzip2: unpack it",
    b"\xfd7zXZ": "compressed by xz: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it",
    b"7z\xbc\xaf": "a 7z archive: unpack it",
    b"Rar!": "a RAR archive: unpack it",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"%PDF": "a PDF document",
}
HTML = (b"<!doctype", b"<html", b"<?xml", b"<head", b"<body")
HEAD = 4096  # bytes that are read
SHOWN = 40  # characters of a text that a message shows


def is_safetensors(path: Path) -> bool:
    """Check whether a file begins as safetensors does: with the length of a header, and the header."""
    head = _head(path)
    return head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= path.stat().st_size - 8


def not_of_torch(path: Path) -> str:
    """Return what a file is if torch.save can't have written it; empty if it may have."""
    head = _head(path)
    if not head:
        return "an empty file"
    if zipfile.is_zipfile(path):
        with suppress(Exception), zipfile.ZipFile(path) as archive:
            return _not_of_torch_zip(archive.namelist())
        return ""  # damaged, see `damage` in io.py
    if head.lstrip().lower().startswith(HTML):
        return "a web page, not the file: its download needs another address, or a login"
    for start, kind in STARTS.items():
        if head.startswith(start):
            return kind
    with suppress(UnicodeDecodeError):
        text = head[: HEAD - 4].decode()  # without the last bytes, which may be a part of a character
        if text.isprintable() or all(each.isprintable() or each in "\r\n\t\f" for each in text):
            return f"a text file, not weights: it begins with {text.strip()[:SHOWN]!r}"
    return ""


def _not_of_torch_zip(names: Sequence[str]) -> str:
    """Return what a zip file is, by the names of its parts; empty if torch.save may have written it."""
    if any(name.endswith("/constants.pkl") for name in names):
        return "a TorchScript program, which is code: torch.save the state_dict() of torch.jit.load(<file>) instead"
    if any(name.endswith("data.pkl") for name in names):
        return ""
    if names and all(name.endswith(".npy") for name in names):
        return "a .npz file of numpy: save a state_dict by torch.save"
    if any(name.endswith((".pth", ".pt", ".ckpt", ".safetensors", ".bin")) for name in names):
        return "a zip archive of files: unpack it"
    return "a zip file that torch.save did not write"


def _head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(HEAD)
