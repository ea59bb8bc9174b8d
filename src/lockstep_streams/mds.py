"""Read where the images of a shard of MosaicML's format MDS lie, and write such shards.

A shard begins with the number of its samples and where each begins, and a description of its columns in JSON. A sample
begins with the sizes of its columns that have no fixed size. Nothing is unpickled: only the columns of the images and
labels are read, and their encodings must be those of an image file, a text or a whole number.
"""

import contextlib
import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from lockstep.errors import UserError
from lockstep_streams.shard_files import LONGEST, TEXTS, Sample, Shard, Suffixes, one_column, other_kind

IMAGE_ENCODINGS = ("jpeg", "png", "bytes")  # whose bytes are those of an image file
NUMBERS = {
    "int": "<i8",
    "int8": "<i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "<u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
}
LABEL_ENCODINGS = ("str", "str_int", *NUMBERS)
MOST_COLUMNS = 10_000
MOST_BYTES = 1 << 32  # of a shard: its places are numbers of 32 bits
INDEX = "index.json"  # names the shards of a folder
PIECE = 1 << 20  # bytes that are unpacked at a time
XXHASHES = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")  # of the package xxhash
Hashes = Mapping[str, str]  # of a file, in hex, by kind: sha1, xxh64


def scan_mds(path: Path | str, image: Suffixes, label: str | None, source: Path, packed: IO[bytes]) -> Shard:
    """Return the images of an MDS shard. Those of a compressed shard are copied to `packed`.

    Args:
        path: the shard's name, for messages; its ending tells whether it is compressed.
        image: the column of the images; None: `image`, or the only one that has images.
        label: the column of the labels, texts or whole numbers.
        source: the shard.
        packed: the file to copy to.

    Raises:
        UserError: The shard is damaged, has other columns or encodings, or is compressed otherwise than by zstd.
    """
    is_compressed = str(path).lower().endswith(".zstd")
    shard, at = Shard(TEXTS), "its start"
    image, label = one_column(path, image, label)
    try:
        content = decompressed(path, source) if is_compressed else np.memmap(source, mode="r").data
        (count,) = struct.unpack_from("<I", content, 0)
        starts = np.frombuffer(content, "<u4", count + 1, 4).astype(np.int64)
        head = 4 + 4 * (count + 1)
        if starts[0] < head or starts[-1] != len(content) or (np.diff(starts) < 0).any():
            raise ValueError("its samples do not fit its size")
        columns = columns_of(json.loads(bytes(content[head : starts[0]])))
        image, label_encoding = chosen(path, columns, image, label)
        variable = [name for name, (_, size) in columns.items() if size is None]
        for row, (start, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            at = f"sample {row}"
            sizes = dict(zip(variable, struct.unpack_from(f"<{len(variable)}I", content, start), strict=True))
            place, places = start + 4 * len(variable), {}
            for name, (_, size) in columns.items():
                places[name] = place, sizes[name] if size is None else size
                place += places[name][1]
            if place != stop:
                raise ValueError("its columns do not fit its size")
            begin, size = places[image]
            text = label_text(label_encoding, content, *places[label])
            if not size:
                raise UserError(f"{path}: {at} has no image: its column {image} must hold the bytes of an image file")
            if not text:
                raise UserError(f"{path}: {at} has no label: its column {label} must hold texts or whole numbers")
            if is_compressed:
                place = packed.tell()
                packed.write(content[begin : begin + size])
                begin = place
            shard.samples.append(Sample(f"{str(path).rpartition('/')[2]}:{row:010}", text, begin, size))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error, RecursionError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"{path}: damaged MDS file ({error}) at {at}: it must be written or copied again") from error
    return shard


def columns_of(description: Any) -> dict[str, tuple[str, int | None]]:
    """Return the encoding and the fixed size of each column, None without one, in their order in a sample."""
    names, encodings, sizes = (description[f"column_{key}"] for key in ("names", "encodings", "sizes"))
    if not len(names) == len(encodings) == len(sizes) <= MOST_COLUMNS or len(set(names)) != len(names):
        raise ValueError("its columns are not described")
    if not all(size is None or (type(size) is int and 0 <= size < 1 << 32) for size in sizes):
        raise ValueError("its columns have wrong sizes")
    return {str(name): (str(kind), size) for name, kind, size in zip(names, encodings, sizes, strict=True)}


def chosen(
    path: Path | str, columns: dict[str, tuple[str, int | None]], image: str | None, label: str
) -> tuple[str, str]:
    """Return the column of the images and the encoding of the labels.

    Raises:
        UserError: There is no such column, or it has another encoding.
    """
    listed = f"its columns are {', '.join(f'{name} ({kind})' for name, (kind, _) in columns.items())}"
    right = "choose by data.image= and data.label="
    if image is None:
        of_images = [name for name, (kind, _) in columns.items() if kind.partition(":")[0] in IMAGE_ENCODINGS]
        image = of_images[0] if len(of_images) == 1 and "image" not in columns else "image"
    if missing := [name for name in (image, label) if name not in columns]:
        raise UserError(f"{path}: no column {missing[0]}, {listed}: {right}")
    for name, known in ((image, IMAGE_ENCODINGS), (label, LABEL_ENCODINGS)):
        kind = columns[name][0]
        if kind.partition(":")[0] not in known:  # jpeg:90 states a quality
            why = "is never unpickled" if kind == "pkl" else "is not read"
            if "jpeg" in kind and ("list" in kind or "array" in kind):
                why = "has several images, and a sample is one"
            raise UserError(
                f"{path}: the column {name} has the encoding {kind}, which {why}: known are {', '.join(known)}"
            )
    return image, columns[label][0]


def label_text(encoding: str, content: Any, start: int, size: int) -> str:
    """Return a label as text."""
    if encoding in NUMBERS:
        return str(np.frombuffer(content, NUMBERS[encoding], 1, start)[0])
    if size > LONGEST:
        raise ValueError(f"a label of {size:,} bytes, which must be a short text")
    return bytes(content[start : start + size]).decode().strip()


def decompressed(path: Path | str, source: Path) -> Any:
    """Return the content of a file that zstd has compressed.

    It is read in pieces, so that a small file with a huge content does not fill the memory.

    Raises:
        UserError: pyarrow is missing.
        ValueError: The file is damaged, or its content is larger than an MDS shard can be, or than its own head states.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise UserError(f"{path}: shards that zstd has compressed need pyarrow: pip install pyarrow") from error
    try:
        with pa.input_stream(str(source), compression="zstd") as stream:
            content, limit = bytearray(), MOST_BYTES
            while piece := stream.read(PIECE):
                content += piece
                if limit == MOST_BYTES and len(content) >= 4:
                    (count,) = struct.unpack_from("<I", content, 0)
                    if len(content) >= 8 + 4 * count:
                        limit = min(limit, *struct.unpack_from("<I", content, 4 + 4 * count))
                if len(content) > limit:
                    raise ValueError(f"its content is larger than {limit:,} bytes")
            return memoryview(content)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(str(error).partition("\n")[0]) from error


class NoMds(UserError):
    """An index.json names no MDS shards."""


def shards_in(description: bytes, where: str) -> dict[str, Hashes]:
    """Return the shards that an index.json of MDS names, by their paths from its folder, with their hashes.

    Args:
        description: the file's content.
        where: the file, for messages.

    Raises:
        NoMds: it names others.
        UserError: it is damaged.
    """
    if kind := other_kind(description[:512]):
        raise UserError(f"{where}: {kind}")
    try:
        content = json.loads(description)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: damaged ({error}): copy it again, or remove it") from error
    try:
        files = [each.get("zip_data") or each["raw_data"] for each in content["shards"]]
        names = [each["basename"] for each in files]
        hashes = [{str(kind): str(value) for kind, value in (each.get("hashes") or {}).items()} for each in files]
        kinds = {
            (str(each["format"]), (each.get("compression") or "zstd").partition(":")[0]) for each in content["shards"]
        }
    except (TypeError, KeyError, AttributeError) as error:
        raise NoMds(f"{where}: names no MDS shards ({error})") from error
    if others := kinds - {("mds", "zstd")}:
        listed = " and ".join(" by ".join(each) for each in sorted(others))
        raise NoMds(f"{where}: its shards are {listed}: must be mds, zstd")
    if any(not isinstance(name, str) or {"", ".", ".."} & set(name.split("/")) for name in names):
        raise UserError(f"{where}: names a file elsewhere")
    return dict(zip(names, hashes, strict=True))


def check_hashes(path: Path | str, file: Any, hashes: Hashes) -> set[str]:
    """Compare a shard with its hashes in index.json. Return their kinds if none of them can be computed here.

    Raises:
        UserError: One differs.
    """
    makers = {kind: partial(hashlib.new, kind, usedforsecurity=False) for kind in hashlib.algorithms_available}
    with contextlib.suppress(ImportError):
        import xxhash

        makers |= {kind: getattr(xxhash, kind) for kind in XXHASHES}
    for kind in hashes.keys() & makers.keys():
        file.seek(0)
        if hashlib.file_digest(file, makers[kind]).hexdigest() != hashes[kind].lower():
            raise UserError(f"{path}: damaged: its {kind} is not that in {INDEX}: it must be written or copied again")
    return set() if hashes.keys() & makers.keys() else {*hashes}


def check_named(root: str, paths: Iterable[str], read: Callable[[str], bytes | None]) -> dict[str, Hashes]:
    """Return the hashes of MDS shards in files index.json, by the shards' paths.

    Refuse MDS shards other than those that an index.json names: strange ones beside it, and a cut copy.

    Args:
        root: the folder or URL, for messages.
        paths: of all shards and of all files index.json, below it.
        read: returns the content of a file index.json; None: it can't be read.

    Raises:
        UserError: There are such shards, one that is named is missing, or a file index.json is damaged or can't be
            read.
    """
    shards = {path.removesuffix(".zstd") for path in paths if path.endswith((".mds", ".mds.zstd"))}
    folders = [path.removesuffix(INDEX) for path in paths if path.rpartition("/")[2] == INDEX]
    hashes: dict[str, Hashes] = {}
    for folder in folders:
        beside = {path for path in shards if path.rpartition("/")[0] == folder.rstrip("/")}
        where, reason = f"{root}/{folder}{INDEX}", "it is listed"
        try:
            description = read(folder + INDEX)
        except OSError as error:
            description, reason = None, str(error.strerror)
        if description is None:
            raise UserError(f"{where}: can't be read ({reason})")
        try:
            of_folder = shards_in(description, where)
            hashes |= {folder + name: of_shard for name, of_shard in of_folder.items() if of_shard}
            named = {folder + name.removesuffix(".zstd") for name in of_folder}
        except NoMds:
            if not beside:  # it is of another program
                continue
            raise
        if others := sorted(beside - named):
            raise UserError(f"{root}/{others[0]}: the index.json beside it does not name it: remove one of them")
        if missing := sorted(named - shards):
            raise UserError(f"{root}/{missing[0]}: {folder}{INDEX} names it: copy it, or remove {INDEX}")
    return hashes
