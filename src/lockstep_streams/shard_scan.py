"""Find the images of a shard, whatever its format."""

import hashlib
from pathlib import Path
from typing import IO

from lockstep_streams.mds import scan_mds
from lockstep_streams.shard_files import Shard, Suffixes, scan_parquet, scan_tar

EXTENSIONS = (".tar", ".parquet", ".mds", ".mds.zstd")
PACKED = (".parquet", ".zstd")
LONGEST_NAME = 1024  # bytes of the name of an image


def is_packed(path: Path | str) -> bool:
    """Check whether the images of a shard can't be read where they lie, because the shard is compressed."""
    return str(path).lower().endswith(PACKED)


def scan(path: Path | str, image: Suffixes, label: str | None, source: Path, packed: IO[bytes]) -> Shard:
    """Return the images of a shard, and copy them to `packed` if it is compressed.

    Args:
        path: the shard's name, for messages; its ending tells the format.
        image, label: see `scan_tar`, `scan_parquet` and `scan_mds`.
        source: the shard.
        packed: the file to copy to.

    Raises:
        UserError: The shard is damaged, or has no such images or labels.
    """
    ending = str(path).lower()
    if ending.endswith(".tar"):
        return scan_tar(path, image, label, source)
    scan_packed = scan_parquet if ending.endswith(".parquet") else scan_mds
    return scan_packed(path, image, label, source, packed)


def stored_name(name: str) -> bytes:
    """Return the name of an image in a column, in which all take as much room as the longest: long ones are cut."""
    encoded = name.encode("utf-8", "surrogateescape")
    if len(encoded) <= LONGEST_NAME:
        return encoded
    return encoded[: LONGEST_NAME - 65] + b"~" + hashlib.sha256(encoded).hexdigest().encode()
