"""What a checkpoint from a stranger may claim: no more than its file holds. docs/untrusted.md has the table."""

import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PARTS = 500_000  # values of a checkpoint, tensors as one, each counted as often as it is referred to
DEPTH = 100
OFTEN = 8  # times that a byte of the file may be a part of a tensor: shared weights, averages
SLACK = 1 << 20
MAKERS = (b"bytearray",)  # what torch takes for data, and makes as large as a number in the pickle says


def archive_fault(archive: zipfile.ZipFile, size: int) -> str:
    """What is wrong with the table of a zip file of `size` bytes, before any of its parts is read: torch.save packs
    nothing, so no part is larger than what it takes, and all together not than the file."""
    parts = archive.infolist()
    if any(part.compress_type != zipfile.ZIP_STORED or part.file_size != part.compress_size for part in parts):
        return "refused, it is packed: torch.save does not pack, and what is packed may be of any size"
    if sum(part.file_size for part in parts) > size:
        return "refused, its parts are said to be larger than the file"
    pickles = [part for part in parts if part.filename.endswith("/data.pkl")]
    if any(maker in archive.read(part) for part in pickles for maker in MAKERS):
        return "refused, it would make what the file does not hold: bytearray"
    return ""


def claim_fault(checkpoint: Mapping[str, Any]) -> str:
    """What a loaded checkpoint claims beyond what was read: tensors larger than their storage or of no storage, values
    that refer to each other until nobody could count them."""
    stored: dict[int, int] = {}
    claimed = count = 0
    left: list[tuple[Any, int]] = [(checkpoint, 0)]
    while left:
        value, depth = left.pop()
        count += 1
        if count > PARTS or depth > DEPTH:
            return "refused, its values refer to each other too often or too deep"
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_meta or value.is_quantized:
                return "refused, it holds a tensor that is no plain one"
            storage = value.untyped_storage()
            if value.numel() * value.element_size() > storage.nbytes():
                return f"refused, a tensor of shape {list(value.shape)} is larger than what the file holds of it"
            stored[storage.data_ptr()] = storage.nbytes()
            claimed += value.numel() * value.element_size()
        elif isinstance(value, Mapping):
            left += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list | tuple | set | frozenset):
            left += [(part, depth + 1) for part in value]
    if claimed > OFTEN * sum(stored.values()) + SLACK:
        return "refused, its tensors together are much larger than the file"
    return ""
