"""Read where the images of a shard lie: of a tar file as WebDataset writes it, or of a parquet file.

Only images, texts and numbers are read, and nothing is unpickled or executed.
"""

import errno
import json
import tarfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from lockstep.errors import UserError
from lockstep.vision.data.walk import is_left_behind

# Endings of other images, which are counted.
OTHER_IMAGES = ("jfif", "jpe", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "avif", "heic", "heif", "jp2", "tga")
IMAGES, LABELS = ("jpg", "jpeg", "png"), ("cls", "txt", "json")
FOLDERS, TEXTS = (
    "folders",
    "texts",
)  # label sources: folders in the images' names; .cls, .txt or .json members, or a column
LONGEST = 1 << 20  # bytes of a text
DAMAGED = (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError)


class Sample(NamedTuple):
    """An image of a shard, at `start` in its file."""

    name: str
    label: str
    start: int
    size: int


@dataclass
class Shard:
    """The images of a shard, and the kind of their labels."""

    label_source: str  # FOLDERS or TEXTS; empty: there is no image yet
    class_names: tuple[str, ...] = ()  # the classes in order, if the shard lists them
    samples: list[Sample] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)  # other images by kind, as of `walk.Walk`


def scan_tar(path: Path | str, image: str | None, label: str, source: Path) -> Shard:
    """Return the images of a tar file.

    The label of an image is the text of the member `<key>.cls` or `<key>.txt`, or the value of `label` in `<key>.json`,
    where the key is its name up to the first dot. Without any of them it is the first folder in the name.

    Args:
        path: the shard's name, for messages.
        image: the ending of the images' names; None: jpg, jpeg or png.
        label: a key of the .json members.
        source: the file.

    Raises:
        UserError: The file is damaged or has no end, or an image has no label.
    """
    shard, last = Shard(""), "its start"
    try:
        with tarfile.open(source, "r:") as opened:
            tar: Any = opened  # `members` is in no stub
            key: str | None = None
            images: list[Sample] = []
            texts: dict[str, str] = {}
            while (member := tar.next()) is not None:
                tar.members.clear()  # it would keep them all
                name = member.name.removeprefix("./")
                if tar.offset <= member.offset:
                    raise ValueError(f"a wrong size of {name}")
                last = name
                folder, _, file = name.rpartition("/")
                stem, _, ending = file.partition(".")
                if image is None and (kind := passed_over_kind(member, folder, ending.lower().rpartition(".")[2])):
                    shard.passed_over[kind] += 1
                    continue
                if not member.isreg() or member.issparse() or not stem:
                    continue
                if key != f"{folder}/{stem}":
                    add(path, shard, images, texts, label)
                    key, images, texts = f"{folder}/{stem}", [], {}
                ending = ending.lower()
                if ending == image or (image is None and ending.rpartition(".")[2] in IMAGES):
                    images.append(Sample(name, "", member.offset_data, member.size))
                elif ending in LABELS:
                    if member.size > LONGEST:
                        raise UserError(f"{path}: {name} has {member.size:,} bytes: a label must be a short text")
                    texts[ending] = tar.extractfile(member).read().decode().strip()
            add(path, shard, images, texts, label)
            tar.fileobj.seek(tar.offset)
            if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise ValueError("no end mark")  # tarfile takes a damaged header for the end
    except DAMAGED as error:
        reason = f"truncated or damaged tar file ({error})"
        raise UserError(f"{path}: {reason} after {last}: it must be written or copied again") from error
    return shard


def passed_over_kind(member: tarfile.TarInfo, folder: str, ending: str) -> str:
    """Return why an image of a tar file is passed over, by kind; empty if it is not, or no image."""
    left_behind = next((each for each in folder.split("/") if each not in (".", "..") and is_left_behind(each)), None)
    if ending not in (*IMAGES, *OTHER_IMAGES):
        return ""
    if left_behind:
        return f"in {left_behind}"
    if member.islnk() or member.issym():
        return "links"
    return f".{ending}" if ending in OTHER_IMAGES and member.isreg() else ""


def add(path: Path | str, shard: Shard, images: list[Sample], texts: dict[str, str], label: str) -> None:
    """Add the images of a key to a shard, with their label.

    Raises:
        UserError: There is no image or no label, several images, or labels come from elsewhere than those before.
    """
    text = texts.get("cls", texts.get("txt"))
    if text is None and "json" in texts:
        text = label_in(texts["json"], label)
    if not images:
        if "cls" in texts:
            last = shard.samples[-1].name if shard.samples else "its start"
            raise UserError(f"{path}: a label after {last} has no image: known are {', '.join(IMAGES)}")
        return
    if text is not None and len(images) > 1:
        names = f"{images[0].name} and {images[1].name}"
        raise UserError(f"{path}: {names} have one label: choose one by data.image=<the ending of its name>")
    for each in images:
        of_folder, slash, _ = each.name.partition("/")
        value = text if text is not None else of_folder if slash else ""
        if not value:
            members = f"a .cls, .txt or .json member (with the key {label}) beside it"
            raise UserError(f"{path}: {each.name} has no label: it must have {members}, or a folder in its name")
        source = TEXTS if text is not None else FOLDERS
        if shard.label_source not in ("", source):
            missing = f"{each.name} has no .cls, .txt or .json member" if text is None else f"only {each.name} has one"
            raise UserError(f"{path}: {missing}: all images must have a label of one kind, or none of them")
        shard.label_source = source
        shard.samples.append(each._replace(label=value))


def label_in(text: str, label: str) -> str | None:
    """Return the label in a JSON text; None if it has none."""
    content = json.loads(text)
    value = content.get(label) if isinstance(content, dict) else None
    return str(value) if type(value) in (int, str) else None


def scan_parquet(path: Path | str, image: str | None, label: str, source: Path, packed: IO[bytes]) -> Shard:
    """Copy the images of a parquet file to `packed` and return where they lie there.

    Args:
        path: the shard's name, for messages, and for images without a name.
        image: the column of the images, as bytes, or as `datasets` writes them: a struct of `bytes` and `path`. None:
            `image`. Its paths, if there are any, are the names; without them a name has the number of the row.
        label: the column of the labels, whole numbers or texts.
        source: the file.
        packed: the file to copy to.

    Raises:
        UserError: pyarrow is missing, the file is damaged, has other columns, or a row has no image or no label.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(f"{path}: parquet files need pyarrow: pip install pyarrow") from error
    shard, image = Shard(TEXTS), image or "image"
    row = 0
    try:
        with pq.ParquetFile(source, pre_buffer=False) as file:
            schema = file.schema_arrow
            if missing := [each for each in (image, label) if each not in schema.names]:
                columns = f"its columns are {', '.join(schema.names)}"
                raise UserError(f"{path}: no column {missing[0]}, {columns}: choose by data.image= and data.label=")
            shard.class_names = names = class_names(schema.metadata, label)
            for batch in file.iter_batches(batch_size=64, columns=[image, label], use_threads=False):
                rows: Any = zip(*(batch.column(each).to_pylist() for each in (image, label)), strict=True)
                for value, number in rows:
                    at = f"{path}: row {row}"
                    content, name = (
                        (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
                    )
                    if not isinstance(content, bytes) or not content:
                        raise UserError(f"{at} has no image: its column {image} must hold the bytes of an image file")
                    text = label_of(number, names)
                    if text is None:
                        right = f"whole numbers below {len(names)}" if names else "whole numbers or texts"
                        raise UserError(f"{at} has the label {number!r}: its column {label} must hold {right}")
                    shard.samples.append(
                        Sample(name or f"{str(path).rpartition('/')[2]}:{row:010}", text, packed.tell(), len(content))
                    )
                    packed.write(content)
                    row += 1
    except (pa.ArrowException, *DAMAGED) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):  # of `packed`
            raise
        reason = f"damaged parquet file ({str(error).partition(chr(10))[0]})"
        raise UserError(f"{path}: {reason} after row {row}: it must be written or copied again") from error
    return shard


def label_of(value: Any, names: tuple[str, ...]) -> str | None:
    """Return a label as text; None if it is none."""
    if names:
        return names[value] if type(value) is int and 0 <= value < len(names) else None
    return str(value) if type(value) in (int, str) and value != "" else None


def class_names(metadata: dict[bytes, bytes] | None, label: str) -> tuple[str, ...]:
    """Return the names of the classes that `datasets` writes into a parquet file; none if there are none."""
    try:
        names = json.loads((metadata or {})[b"huggingface"])["info"]["features"][label]["names"]
        return tuple(map(str, names)) if isinstance(names, list) else ()
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
