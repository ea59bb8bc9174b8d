"""Read where the images of a shard lie: of a tar file as WebDataset writes it, or of a parquet file.

Only images, texts and numbers are read, and nothing is unpickled or executed.
"""

import errno
import json
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from lockstep.errors import UserError
from lockstep.text import join_names
from lockstep.vision.data.walk import is_left_behind

# Suffixes of other images, which are counted.
OTHER_IMAGES = ("jfif", "jpe", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "avif", "heic", "heif", "jp2", "tga")
IMAGES, LABELS = ("jpg", "jpeg", "png"), ("cls", "txt", "json")
FOLDERS, TEXTS = (
    "folders",
    "texts",
)  # label sources: folders in the images' names; .cls, .txt or .json members, or a column
GONE = "is gone, and was there when the shards were listed: put it back, or start again without it"
LONGEST = 1 << 20  # bytes of a text
USUAL_LABEL = "label"  # the key of .json members, if data.label is not given
TABLES = ("csv", "tsv", "jsonl")  # endings of members that may list labels
NOTES = re.compile(r"(readme|licen[sc]e|copying|notice)\b", re.IGNORECASE)  # texts that are no labels
PART_FOLDERS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
OF_LIST = re.compile(r"(all|train|val|test)-\d{5,}\.tar")
RECORDS = (tarfile.BLOCKSIZE, tarfile.RECORDSIZE, *(1 << power for power in range(14, 21)))  # bytes, of tar's writers
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\3\4": "zip",
    b"7z\xbc\xaf\x27\x1c": "7z",
}  # by the first bytes
Suffixes = str | Sequence[str] | None  # of images' names
DAMAGED = (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError)


class Sample(NamedTuple):
    """An image of a shard, at `start` in its file."""

    name: str
    label: str
    start: int
    size: int


@dataclass
class Shard:
    """The images of a shard, and the kind of their labels. JSON keeps its fields, see `remote_index.Records`."""

    label_source: str  # FOLDERS or TEXTS; empty: there is no image yet
    class_names: tuple[str, ...] = ()  # the classes in order, if the shard lists them
    samples: list[Sample] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)  # other images by kind, as of `walk.Walk`
    highest: list[int] = field(default_factory=list)  # the highest values of some images of 16 bits

    @classmethod
    def from_json(cls, content: Any) -> "Shard":
        """Return the shard whose fields JSON has kept."""
        lists = {"samples": [Sample(*each) for each in content["samples"]], "class_names": (*content["class_names"],)}
        return cls(**{**content, **lists, "passed_over": Counter(content["passed_over"])})


def scan_tar(path: Path | str, image: Suffixes, label: str | None, source: Path) -> Shard:
    """Return the images of a tar file.

    The label of an image is the text of the member `<key>.cls`, else the value of `label` in `<key>.json`, else the
    text of `<key>.txt`. The key is the image's name up to the first dot, or up to the last one. Another `label` than
    `label` must be in the .json member of each image. If there is no member that may be a label, or if `label` is None,
    the label is the first folder in the name.

    Args:
        path: the shard's name, for messages.
        image: the endings of the images' names; None: jpg, jpeg or png.
        label: a key of the .json members; None: no member is a label.
        source: the file.

    Raises:
        UserError: The file is damaged or has no end, an image has no label, or a member may be a label and is not used.
    """
    shard, members, last = Shard(""), TarLabels(path, label), "its start"
    suffixes = (image.lstrip(".").lower(),) if isinstance(image, str) else image
    try:
        with open(source, "rb") as file:
            if kind := other_kind(file.read(tarfile.BLOCKSIZE)):
                raise UserError(f"{path}: {kind}")
        with tarfile.open(source, "r:") as opened:
            tar: Any = opened  # `members` is in no stub
            while (member := tar.next()) is not None:
                tar.members.clear()  # it would keep them all
                name = member.name.removeprefix("./")
                if tar.offset <= member.offset:
                    raise ValueError(f"a wrong size of {name}")
                last = name
                folder, _, file_name = name.rpartition("/")
                stem, _, ending = file_name.partition(".")
                ending = ending.lower()
                if kind := passed_over_kind(member, folder, ending, suffixes):
                    shard.passed_over[kind] += 1
                elif member.isdir() or not stem or left_behind_in(folder):
                    continue
                elif not member.isreg() or member.issparse():
                    members.refuse_indirect(member, name, ending, suffixes)
                elif is_image(ending, suffixes):
                    members.images.append(Sample(name, "", member.offset_data, member.size))
                elif label is not None:
                    members.add(member, name, tar.extractfile)
            check_end(tar.fileobj, tar.offset, source.stat().st_size)
    except DAMAGED as error:
        if isinstance(error, FileNotFoundError):
            raise UserError(f"{path}: {GONE}") from error
        reason = f"truncated or damaged tar file ({error})"
        raise UserError(f"{path}: {reason} after {last}: it must be written or copied again") from error
    members.label_all(shard)
    return shard


def other_kind(head: bytes) -> str:
    """Return what is wrong with a file that has the ending .tar, and begins as one of another kind; else nothing."""
    if head[257:262] == b"ustar":
        return ""
    for magic, program in COMPRESSED.items():
        if head.startswith(magic):
            return f"is compressed by {program}: unpack it, since its images are read singly"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is a web page or an error message, as servers send to who must log in: give the file itself"
    if head.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS: fetch the file by `git lfs pull`"
    return ""


def check_end(file: IO[bytes], offset: int, size: int) -> None:
    """Check that a tar file ends where its end mark is.

    Writers fill the last record with zeros: 10,240 bytes, or none, or a power of two with `tar -b`. More zeros stand
    in the place of images, as in a file that was made in its full size before it was downloaded.

    Args:
        file: the tar file.
        offset: of the end mark.
        size: of the file.

    Raises:
        ValueError: There is no end mark, something follows it, or more zeros than a writer leaves.
    """
    file.seek(offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise ValueError(f"no end mark at byte {offset:,}")  # tarfile takes a damaged header for the end
    at = offset + tarfile.BLOCKSIZE
    while content := file.read(1 << 20):
        if beyond := content.lstrip(b"\0"):
            at += len(content) - len(beyond)
            raise ValueError(f"an end mark at byte {offset:,}, and more at byte {at:,}, as of joined or damaged files")
        at += len(content)
    if not any(size % record == 0 and size - offset <= record + tarfile.BLOCKSIZE for record in RECORDS):
        raise ValueError(f"{size - offset:,} zeros from byte {offset:,} to its end, as of a file that is not complete")


def is_image(ending: str, suffixes: Sequence[str] | None) -> bool:
    """Check whether a member with this ending, in lower case, is an image that is wanted."""
    return ending.rpartition(".")[2] in IMAGES if suffixes is None else ending in suffixes


def left_behind_in(folder: str) -> str:
    """Return the first hidden folder, or one that programs leave, in a path; empty if there is none."""
    return next((each for each in folder.split("/") if each not in (".", "..") and is_left_behind(each)), "")


def passed_over_kind(member: tarfile.TarInfo, folder: str, ending: str, suffixes: Sequence[str] | None) -> str:
    """Return why an image of a tar file is passed over, by kind; empty if it is not, or no image."""
    last = ending.rpartition(".")[2]
    if last not in (*IMAGES, *OTHER_IMAGES):
        return ""
    if left_behind := left_behind_in(folder):
        return f"in {left_behind}"
    if not is_image(ending, suffixes):
        others = f" other than {', '.join(suffixes)}" if suffixes and last in IMAGES else ""
        return f".{last}{others}" if member.isreg() else ""
    return "links" if member.islnk() or member.issym() else ""


class Text(NamedTuple):
    """What a member of a tar file states as a label.

    Attributes:
        member: its name.
        label: None: there is none.
        fault: why there is none, the end of a message.
        lacks_key: whether it is a .json member without the key.
    """

    member: str
    label: str | None
    fault: str = ""
    lacks_key: bool = False


class TarLabels:
    """The images of a tar file, and the members that may be their labels, wherever they lie in it.

    Args:
        path: the shard's name, for messages.
        label: see `scan_tar`.
    """

    def __init__(self, path: Path | str, label: str | None) -> None:
        self.path, self.label = path, label
        self.images: list[Sample] = []
        self.texts: dict[tuple[str, str], list[Text]] = {}  # by name without the ending, and ending
        self.others: dict[str, str] = {}  # by key: the first other member
        self.tables: list[str] = []  # members that may list labels

    def refuse_indirect(self, member: tarfile.TarInfo, name: str, ending: str, suffixes: Sequence[str] | None) -> None:
        """Refuse an image or a label that is stored otherwise than as its bytes: as a sparse file, or as a link."""
        is_label = self.label is not None and ending.rpartition(".")[2] in LABELS
        if not is_label and not is_image(ending, suffixes):
            return
        if member.issparse():
            raise UserError(f"{self.path}: {name} is a sparse member: write the shard again without `tar --sparse`")
        if member.islnk() or member.issym():
            right = "write the shard again with `tar --dereference --hard-dereference`"
            raise UserError(f"{self.path}: the label {name} is a link: {right}")

    def add(self, member: tarfile.TarInfo, name: str, open_member: Callable[[tarfile.TarInfo], Any]) -> None:
        """Note a member that is no image."""
        folder, slash, file_name = name.rpartition("/")
        stem, _, ending = file_name.rpartition(".")
        ending = ending.lower()
        if ending not in LABELS:
            self.others.setdefault(first_key(name), name)
            if ending in TABLES:
                self.tables.append(name)
            return
        text = Text(name, None, f"{name} has {member.size:,} bytes: a label must be a short text")
        if member.size <= LONGEST:
            try:
                content = open_member(member).read().decode("utf-8-sig").strip()
                text = self._in_json(name, content) if ending == "json" else Text(name, content)
            except (ValueError, RecursionError) as error:
                text = Text(name, None, f"{name} is no {'JSON' if ending == 'json' else 'text'} in UTF-8 ({error})")
        self.texts.setdefault((f"{folder}{slash}{stem}", ending), []).append(text)

    def _in_json(self, name: str, text: str) -> Text:
        """Return the label in a .json member."""
        content = json.loads(text)
        if not isinstance(content, dict):
            return Text(name, None, f"{name} holds no object in braces: it must have the key {self.label}")
        if self.label not in content:
            keys = f"its keys are {join_names(map(str, content), 5)}" if content else "it has no key"
            right = "choose by data.label=<key>, or data.label=null if the folders are the classes"
            return Text(name, None, f"{name} has no key {self.label}, {keys}: {right}", lacks_key=True)
        value = content[self.label]
        if type(value) not in (int, str):
            right = "must be a whole number or a text"
            return Text(name, None, f"{name} has the {self.label} {json.dumps(value)[:40]}: {right}")
        return Text(name, str(value).strip())

    def label_all(self, shard: Shard) -> None:
        """Add the images to a shard, with their labels.

        Raises:
            UserError: There is no label, several images have one, labels come from different kinds of source, or a
                member may be a label and is not used.
        """
        users: dict[tuple[str, str], list[str]] = {}  # by label: the images that have it
        keys = set()
        for image in self.images:
            keys.add(first_key(image.name))
            text = self._text_of(image.name, users)
            of_folder, slash, _ = image.name.partition("/")
            value = text if text is not None else of_folder if slash else ""
            if not value:
                members = f"a .cls, .txt or .json member (with the key {self.label}) beside it, or "
                right = f"it must have {members if self.label else ''}a folder in its name"
                raise UserError(f"{self.path}: {image.name} has no label: {right}")
            source = TEXTS if text is not None else FOLDERS
            if shard.label_source not in ("", source):
                missing = f"{image.name} has no .cls, .txt or .json member"
                missing = missing if text is None else f"only {image.name} has one"
                raise UserError(f"{self.path}: {missing}: all images must have a label of one kind, or none of them")
            shard.label_source = source
            shard.samples.append(image._replace(label=value))
        for name, images in users.items():
            labels = self.texts[name]
            if len({*images}) > 1:
                ending = "choose one by data.image=<the ending of its name>"
                raise UserError(f"{self.path}: {images[0]} and {images[1]} have one label: {ending}")
            if len(images) != len(labels):
                times = f"{images[0]} is there {len(images)} times, and {labels[0].member} {len(labels)} times"
                raise UserError(f"{self.path}: {times}: remove what is older")
        self._check_unused(shard, users, keys)
        check_parts(self.path, shard)

    def _text_of(self, image: str, users: dict[tuple[str, str], list[str]]) -> str | None:
        """Return the label of an image in a member; None: no member has its name.

        Args:
            image: its name.
            users: this image is added to those of its label.
        """
        candidates: dict[str, tuple[str, str]] = {}
        for key in (first_key(image), image.rpartition(".")[0]):
            candidates |= {ending: (key, ending) for ending in LABELS if (key, ending) in self.texts}
        if not candidates and self.label in (None, USUAL_LABEL):
            return None
        texts = {}
        for ending, name in candidates.items():
            # of an image that is there twice, each with its label, the first has the first one
            users.setdefault(name, []).append(image)
            texts[ending] = self.texts[name][min(len(users[name]), len(self.texts[name])) - 1]
        if self.label != USUAL_LABEL:
            if "json" not in texts:
                what = f"{image} has no .json member, which must have the key {self.label}"
                raise UserError(f"{self.path}: {what}: correct data.label, or leave it out for .cls and .txt members")
            chosen = texts["json"]
        elif "cls" in texts:
            chosen = texts["cls"]
        elif "json" in texts and "txt" in texts and not texts["json"].lacks_key:
            chosen, other = texts["json"], texts["txt"]
            if chosen.label is not None and chosen.label != other.label:
                labels = f"{chosen.label!r} in {chosen.member} and {(other.label or '')[:40]!r} in {other.member}"
                raise UserError(f"{self.path}: {image} has two labels, {labels}: remove one of them, or write a .cls")
        else:
            chosen = texts["txt"] if "txt" in texts else texts["json"]
        if chosen.label is None:
            raise UserError(f"{self.path}: {chosen.fault}")
        if not chosen.label:
            raise UserError(f"{self.path}: {image} has no label: {chosen.member} must have one")
        return chosen.label

    def _check_unused(self, shard: Shard, users: Mapping[tuple[str, str], Any], keys: Collection[str]) -> None:
        """Refuse labels without an image, and members that may be labels where the folders would be the classes.

        Where other members are the labels, such texts are counted.

        Args:
            shard: with the images.
            users: the labels that images have.
            keys: of the images.
        """
        if self.label is None or (not self.images and shard.passed_over):
            return
        unused = {name: texts[0].member for name, texts in self.texts.items() if name not in users}
        if shard.label_source == TEXTS:
            for (name, ending), member in unused.items():
                if first_key(name) in keys:
                    continue
                if ending == "cls":
                    known = f"known are {', '.join(IMAGES)}, and others by data.image=[jpg,webp], for example"
                    raise UserError(f"{self.path}: the label {member} has no image: {known}")
                shard.passed_over[f".{ending} without an image"] += 1
            return
        beside = [self.others[key] for key in keys if key in self.others]
        members = (*unused.values(), *self.tables, *beside)
        for member in sorted(each for each in members if not NOTES.match(each.rpartition("/")[2])):
            if not self.images:
                raise UserError(f"{self.path}: {member} is a label, and there is no image: put them in one shard")
            example = self.images[0].name
            right = (
                f"write labels as <key>.cls beside <key>.{example.rpartition('.')[2]}, or data.label=null for folders"
            )
            raise UserError(f"{self.path}: {member} may hold labels, and the folder of {example} would be one: {right}")


def first_key(name: str) -> str:
    """Return a member's name up to the first dot behind its folders, which is WebDataset's key."""
    folder, slash, file_name = name.rpartition("/")
    return f"{folder}{slash}{file_name.partition('.')[0]}"


def check_parts(path: Path | str, shard: Shard) -> None:
    """Refuse images whose folders name several parts, or a part in the place of the class.

    Raises:
        UserError: There are such.
    """
    named: dict[str, str] = {}
    in_first = 0
    for each in shard.samples:
        *folders, _ = each.name.split("/")
        parts = [PART_FOLDERS[word.lower()] for word in folders if word.lower() in PART_FOLDERS]
        if parts:
            named.setdefault(parts[0], each.name)
        in_first += len(folders) > 1 and folders[0].lower() in PART_FOLDERS
    right = "write a tar file for each part, and name the part in the file's path"
    # `lockstep shards` writes a list of images, whatever their folders are, and the part is in the shard's name.
    is_of_list = shard.label_source == TEXTS and OF_LIST.fullmatch(str(path).rpartition("/")[2])
    if len(named) > 1 and not is_of_list:
        raise UserError(f"{path}: {' and '.join([*named.values()][:2])} are of two parts: {right}")
    if shard.label_source == FOLDERS and shard.samples and in_first == len(shard.samples):
        first = shard.samples[0].name
        raise UserError(f"{path}: {first}: its first folder names a part, and must be its class: {right}")


def one_column(path: Path | str, image: Suffixes, label: str | None) -> tuple[str | None, str]:
    """Return the columns of a shard that has columns.

    Raises:
        UserError: `image` is a list, or `label` is None: these are for tar files.
    """
    if not isinstance(image, str | None):
        raise UserError(f"{path}: data.image={[*image]} are endings of names in tar files: must be one column here")
    if label is None:
        raise UserError(f"{path}: data.label=null is for folders in tar files: must be the column of the labels here")
    return image, label


def scan_parquet(path: Path | str, image: Suffixes, label: str | None, source: Path, packed: IO[bytes]) -> Shard:
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
    shard, (image, label) = Shard(TEXTS), one_column(path, image, label)
    image = image or "image"
    row = 0
    try:
        with open(source, "rb") as opened:
            if kind := other_kind(opened.read(tarfile.BLOCKSIZE)):
                raise UserError(f"{path}: {kind}")
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
        if isinstance(error, FileNotFoundError):
            raise UserError(f"{path}: {GONE}") from error
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
