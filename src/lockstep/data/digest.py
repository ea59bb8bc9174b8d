"""A digest of what a data set has in memory, which tells other data of the same class and length from the same data."""

import hashlib
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

ROWS = 32  # samples of each attribute, from the first to the last
FEW = 16  # a longer list that is not one value for each sample is not searched


def digest_of(dataset: Any) -> str | None:
    """Return a SHA-256, in hex, of some values that a data set's attributes have for its samples; None without any.

    These are arrays, tensors and lists of its length, also in the data sets inside it: images in memory, labels, names
    of files without their folders. No method is called and no sample is loaded, since that might draw random numbers,
    count or open files. Data that is made or read for each sample is unknown.
    """
    digest, known = hashlib.sha256(), False
    for name, values in _attributes(dataset, "", set()):
        for index in np.unique(np.linspace(0, len(values) - 1, ROWS).astype(np.int64)).tolist():
            content = _content(values[index])
            if content is None:
                break
            digest.update(f"{name} {index} ".encode() + content)
            known = True
    return digest.hexdigest() if known else None


def _attributes(dataset: Any, above: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of those attributes that have one value for each sample of their data set."""
    if id(dataset) in seen or not hasattr(dataset, "__len__"):
        return
    seen.add(id(dataset))
    length = len(dataset)
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        parts = value if isinstance(value, list | tuple) and len(value) != length and len(value) <= FEW else [value]
        for number, part in enumerate(parts):
            if isinstance(part, Dataset):
                yield from _attributes(part, f"{above}{name}{number}.", seen)
            elif length and isinstance(part, Tensor | np.ndarray | list | tuple) and _length(part) == length:
                yield f"{above}{name}{number}", part


def _length(values: Any) -> int:
    return len(values) if getattr(values, "ndim", 1) else 0


def _content(value: Any) -> bytes | None:
    """Return the bytes of a plain value; None if it is none."""
    if isinstance(value, Tensor):
        if value.is_sparse or value.is_quantized or value.is_meta:
            return None
        value = value.detach().cpu().contiguous().flatten()
        return repr((value.dtype, value.shape)).encode() + bytes(value.view(torch.uint8).numpy().data)
    if isinstance(value, np.ndarray | np.generic):
        return None if value.dtype.hasobject else f"{value.dtype} {value.shape}".encode() + value.tobytes()
    if isinstance(value, str | PurePath):
        return Path(value).name.encode(errors="surrogateescape")
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool | int | float | None):
        return repr(value).encode()
    if isinstance(value, list | tuple):
        parts = [_content(each) for each in value]
        return None if None in parts else b" ".join(part for part in parts if part is not None)
    return None
