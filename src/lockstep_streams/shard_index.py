"""The index of shards: where each image lies, so that each can be read without those before it.

The index is made once, and its columns are mapped into memory. So opening it takes as long with ten million samples as
with ten, and processes share its memory. tar and MDS files are read where they lie. Parquet files are compressed in
groups of rows, and some MDS files as a whole, so their images are copied once, into a file beside the index.
"""

import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import UserError
from lockstep.files import locked
from lockstep.text import join_names, plural
from lockstep.vision.data.classes import class_names as names_of_classes
from lockstep.vision.data.classes import clean
from lockstep.vision.data.labelled import LabelledFiles, check_headers, fingerprint_of
from lockstep.vision.data.pixels import Reading
from lockstep.vision.data.walk import passed_over_text
from lockstep_streams.mds import XXHASHES, Hashes, check_hashes
from lockstep_streams.shard_files import GONE, IMAGES, Shard
from lockstep_streams.shard_scan import is_packed, scan, stored_name

VERSION = 3  # of the index's format
COLUMNS = ("names", "labels", "places")  # a part has a file for each
BORDERS = "shard_borders"  # one more file of a part, in an index by place
PLACE = np.dtype([("file", "<i4"), ("start", "<i8"), ("size", "<i8")])  # `file`: an index of ShardImages.files
MAX_LABEL = 200  # characters
Stamp = tuple[int, int]  # size and time of the last change of a file


@dataclass(eq=False)
class ShardImages(LabelledFiles):
    """Images in shards, in the order of their classes and names, or of their places. Each is read by one `pread`."""

    places: NDArray[Any]  # of dtype PLACE
    files: Sequence[Path]  # the shards, and after them the file with the images of packed shards, if there are any
    stamps: Sequence[Stamp]  # of `files`, when they were indexed
    sha256: str  # the fingerprint
    # In an index by place: the number of the first image of each shard, and of all images, int64 [shards + 1].
    shard_borders: NDArray[np.int64] | None = None

    uses_random_numbers = False  # again, since Lockstep does not read it from a base class
    skip_hint = ""  # data=shards has no option skip_broken

    def name(self, index: int) -> str:
        return os.fsdecode(self.names[index])

    def location(self, index: int) -> str:
        return f"{self.files[self.places[index]['file']]}: image {self.name(index)}"

    def encoded(self, index: int) -> io.BytesIO:
        file, start, size = self.places[index].item()
        file = -1 if is_packed(self.files[file]) else file  # the last file has the images of packed shards
        path = self.files[file]
        try:
            with open(path, "rb", buffering=0) as shard:
                if stamp(os.fstat(shard.fileno())) != self.stamps[file]:
                    raise UserError(f"{path}: changed after it was indexed: start again, and it is indexed again")
                return io.BytesIO(os.pread(shard.fileno(), size, start))
        except FileNotFoundError as error:
            raise UserError(f"{path}: {GONE}") from error
        except (OSError, OverflowError, MemoryError) as error:
            raise UserError(f"{self.location(index)} can't be read ({error})") from error

    def fingerprint(self) -> str:
        return self.sha256


@dataclass(frozen=True)
class Index:
    """A complete index of shards.

    Attributes:
        folder: its folder.
        parts: the images of each part.
        classes: names of the classes.
        passed_over: the number of images of tar files that were not taken, by kind.
    """

    folder: Path
    parts: dict[str, ShardImages]
    classes: list[str]
    passed_over: Counter[str] = field(default_factory=Counter)

    def cached_arrays(self, name: str, compute: Callable[[], Sequence[NDArray[np.int64]]]) -> list[NDArray[np.int64]]:
        """Return the arrays that `compute` returns.

        The first call stores them in the folder `name` of the index. Later calls map the stored arrays into memory. If
        the index's folder can't be written, every call computes them.
        """

        def fill(new_folder: Path) -> None:
            for number, array in enumerate(compute()):
                np.save(new_folder / f"{number}.npy", array)

        folder = self.folder / name
        if not folder.is_dir() and not os.access(self.folder, os.W_OK):
            return [*compute()]
        make_once(folder, fill)
        return [column(path) for path in sorted(folder.glob("*.npy"), key=lambda path: int(path.stem))]


def open_index(
    root: Path,
    shards: Mapping[str, Sequence[Path]],
    options: Mapping[str, Any],
    index_dir: str | None,
    image_size: int,
    channels: int,
    reading: Reading,
    hashes: Mapping[Path, Hashes] = MappingProxyType({}),
) -> Index:
    """Open the index of shards, and make it first if there is none, or if a shard has changed.

    Args:
        root: the folder of the shards.
        shards: the files of each part, the training part first.
        options: the arguments `image` and `label` of `scan`; `known_classes`, see `classes.ordered`; and `by_place`,
            see `build`.
        index_dir: the folder for indexes; None: `.index` in `root`, or the user's cache if `root` can't be written.
        image_size: pixels.
        channels: 1 or 3.
        reading: how pixels are read.
        hashes: of some shards; they are checked when the index is made.

    Raises:
        UserError: A shard or an image is damaged, a column is missing, or the index can't be written.
    """
    files = [*chain(*shards.values())]
    stats = [stat_of(file) for file in files]
    stamps = [stamp(each) for each in stats]
    # Tools that set the time of a file (rsync, DVC, SOURCE_DATE_EPOCH) can't set that of its last change of status.
    changes = [each.st_ctime_ns for each in stats]
    paths_by_part = {part: [str(file.relative_to(root)) for file in paths] for part, paths in shards.items()}
    # The folder's name has two hashes, of the options and of the shards. So an index that was made with the same
    # options before the shards changed is found by the first hash.
    options_prefix = f"shards-{digest([VERSION, dict(options)])[:16]}"
    name = f"{options_prefix}-{digest([paths_by_part, stamps, changes])[:24]}"

    def load(folder: Path) -> Index:
        # images.bin has the images copied from packed shards. Without them there is none.
        image_files = [path for path in [folder / "images.bin"] if path.is_file()]
        all_stamps = [*stamps, *(stamp(path.stat()) for path in image_files)]
        try:
            content = json.loads((folder / "index.json").read_text("utf-8"))
            parts = {}
            for part, sha256 in content["fingerprints"].items():
                names, labels, places = (column(folder / part / f"{each}.npy") for each in COLUMNS)
                all_files = [*files, *image_files]
                borders = column(folder / part / f"{BORDERS}.npy") if options.get("by_place") else None
                fields = (root, names, labels, image_size, channels, places, all_files, all_stamps, sha256, borders)
                parts[part] = ShardImages(*fields, reading=reading)
            return Index(folder, parts, content["classes"], Counter(content["passed_over"]))
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{folder}: damaged index ({error}): remove it, and it is made again") from error

    def fill(new_folder: Path) -> None:
        logging.getLogger("lockstep").info("indexing %s in %s, once", plural(len(files), "shard"), new_folder.parent)
        with open(new_folder / "images.bin", "wb") as images_file:  # for the images of packed shards
            build(new_folder, shards, options, scan_files(files, options, images_file, hashes))
        if not (new_folder / "images.bin").stat().st_size:
            (new_folder / "images.bin").unlink()
        check_headers([*load(new_folder).parts.values()])

    root_key = digest(str(root.resolve()))[:16]
    beside = [] if index_dir else [root / ".index"]
    folders = [*beside, index_root(index_dir) / root_key]
    parent = next((each for each in folders if (each / name).is_dir()), None) or first_writable(folders)
    make_once(parent / name, fill)
    for index_folder in parent.glob(f"{options_prefix}-*"):
        if index_folder.name != name:  # made before the shards changed
            shutil.rmtree(index_folder, ignore_errors=True)
    return load(parent / name)


def cache_folder() -> Path:
    """Return Lockstep's folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lockstep")


def index_root(index_dir: str | None) -> Path:
    """Return the folder for the indexes of all data sets: `data.index_dir`, or that in the user's cache."""
    return Path(index_dir).expanduser().absolute() if index_dir else cache_folder()


def first_writable(folders: Sequence[Path]) -> Path:
    """Return the first of some folders that can be written, and make it if it is missing.

    Raises:
        UserError: None of them can be written.
    """
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            reason = error.strerror
    raise UserError(f"{folder} can't hold an index ({reason}): use data.index_dir=<a folder that can be written>")


def stat_of(file: Path) -> os.stat_result:
    """Return what the system states of a shard.

    Raises:
        UserError: It is gone.
    """
    try:
        return file.stat()
    except OSError as error:
        raise UserError(f"{file}: {GONE if isinstance(error, FileNotFoundError) else error.strerror}") from error


def stamp(stat: os.stat_result) -> Stamp:
    return stat.st_size, stat.st_mtime_ns


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def column(path: Path) -> NDArray[Any]:
    """Return an array that is mapped into memory. Nothing is unpickled."""
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def make_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder if it is missing. `fill` writes its files to another folder, which is renamed at the end.

    If several processes call this, one of them makes the folder, and the others wait for it.

    Raises:
        UserError: The folder can't be written.
    """
    new_folder = folder.with_name(f".new_{os.getpid()}")
    if folder.is_dir():
        return
    try:
        with locked(folder.parent / ".lock"):  # without locks several make it, and the first wins
            if folder.is_dir():
                return
            shutil.rmtree(new_folder, ignore_errors=True)
            new_folder.mkdir()
            try:
                fill(new_folder)
                for path in new_folder.rglob("*.*"):
                    with open(path, "rb") as file:
                        os.fsync(file)
                os.rename(new_folder, folder)
            finally:
                shutil.rmtree(new_folder, ignore_errors=True)
    except OSError as error:
        if not folder.is_dir():
            if not folder.parent.is_dir():
                gone = "its folder was removed while it was written: put the folder back"
                raise UserError(f"{folder.parent}: no index: {gone}, or use another data.index_dir") from error
            where = f"{folder.parent}: can't be written ({error.strerror})"
            raise UserError(f"{where}: free space, or use another data.index_dir") from error


def scan_files(
    files: Iterable[Path], options: Mapping[str, Any], images_file: IO[bytes], hashes: Mapping[Path, Hashes]
) -> Iterator[Shard]:
    """Scan shards on the disk, check their hashes, and copy the images of packed ones to a file."""
    unchecked = set()
    for path in files:
        shard = scan(path, options["image"], options["label"], path, images_file)
        if path in hashes:
            try:
                with open(path, "rb") as file:
                    unchecked |= check_hashes(path, file, hashes[path])
            except OSError as error:
                reason = GONE if isinstance(error, FileNotFoundError) else f"can't be read ({error.strerror})"
                raise UserError(f"{path}: {reason}") from error
        yield shard
    warn_of_unchecked(unchecked)


def warn_of_unchecked(kinds: Collection[str]) -> None:
    """Log a line about hashes that can't be computed here."""
    if kinds:
        names = join_names(sorted(kinds))
        right = "pip install xxhash checks them" if {*kinds} & {*XXHASHES} else "write sha1 or sha256 to check them"
        logging.getLogger("lockstep").warning("the hashes %s of MDS shards are not checked: %s", names, right)


def build(
    folder: Path, shards: Mapping[str, Sequence[Any]], options: Mapping[str, Any], scanned: Iterable[Shard]
) -> None:
    """Write an index of shards to a folder.

    The samples of a part are sorted by class and name, as those of `image_folder`. So the order does not depend on how
    the images are distributed to shards. With the option `by_place` they stay in the order of the shards and of their
    places there. So the images of a shard have neighbouring numbers.

    Args:
        folder: an empty one.
        shards: the shards of each part, the training part first; their texts are for messages.
        options: see `open_index`.
        scanned: what is in each of them.
    """
    known_classes: Sequence[str] = options.get("known_classes", ())
    passed_over: Counter[str] = Counter()
    label_numbers: dict[str, int] = {}  # each label's number, in the order of appearance
    first: tuple[str, str, tuple[str, ...]] | None = None  # name, label_source, class_names of the first shard
    rows: dict[str, list[tuple[NDArray[Any], ...]]] = {part: [] for part in shards}  # COLUMNS of each shard, by part
    sizes_of_shards: dict[str, list[int]] = {part: [] for part in shards}
    names_of_shards = ((part, f"{path}") for part, paths in shards.items() for path in paths)
    for file_number, ((part, path), shard) in enumerate(zip(names_of_shards, scanned, strict=True)):
        passed_over += shard.passed_over
        sizes_of_shards[part].append(len(shard.samples))
        if not shard.samples:
            continue
        first = first or (path, shard.label_source, shard.class_names)
        first_path, label_source, class_names = first
        if shard.label_source != label_source:
            difference = f"from {shard.label_source}, those of {first_path} from {label_source}"
            raise UserError(f"{path}: its labels come {difference}: all must come from one kind of source")
        if shard.class_names != class_names:
            wanted = "all shards must list the same classes in the same order, or none"
            raise UserError(f"{path}: lists other classes than {first_path}: {wanted}")
        for label, name in {each.label: each.name for each in reversed(shard.samples)}.items():
            if len(label) > MAX_LABEL or len(clean(label).splitlines()) > 1:
                wanted = f"it must be one line of at most {MAX_LABEL} characters"
                raise UserError(f"{path}: the label of {name} is no class: {wanted}")
        names = np.array([stored_name(each.name) for each in shard.samples], np.bytes_)
        numbers = np.array([label_numbers.setdefault(each.label, len(label_numbers)) for each in shard.samples])
        places = np.array([(file_number, each.start, each.size) for each in shard.samples], PLACE)
        rows[part].append((names, numbers, places))
    for part, paths in shards.items():
        if not rows[part]:
            known = passed_over_text(passed_over, IMAGES) or f"known are {', '.join(IMAGES)}"
            raise UserError(f"{paths[0]}: no image in it: {known}")
    assert first is not None
    first_path, _, listed = first
    if not listed and label_numbers.keys() >= {"-1", "0"}:
        right = "leave such images out, or give the class another name"
        raise UserError(f"shards: {first_path.rpartition('/')[0]}: the label -1 is how programs write none: {right}")
    counts = np.bincount(np.concatenate([each[1] for arrays in rows.values() for each in arrays])).tolist()
    class_of, classes = names_of_classes(
        dict.fromkeys(listed, 0) | dict(zip(label_numbers, counts, strict=True)),
        f"shards: {first_path.rpartition('/')[0]}",
        order=listed or None,
        known_classes=known_classes,
    )
    class_numbers = {name: number for number, name in enumerate(classes)}
    class_by_label_number = np.array([class_numbers[class_of[label]] for label in label_numbers])
    first_labels: NDArray[np.int64] | None = None  # the label numbers of the first part
    fingerprints = {}
    for part, arrays in rows.items():
        names, labels, places = (np.concatenate(each) for each in zip(*arrays, strict=True))
        present = np.unique(labels)
        first_labels = present if first_labels is None else first_labels
        if len(others := np.setdiff1d(present, first_labels)):
            what = f"only {part} has the class {[*label_numbers][others[0]]}"
            raise UserError(f"{str(shards[part][0]).rpartition('/')[0]}: {what}: {next(iter(rows))} must have it, too")
        labels = class_by_label_number[labels]
        order = np.arange(len(labels)) if options.get("by_place") else np.lexsort((names, labels))
        (folder / part).mkdir()
        if options.get("by_place"):
            np.save(folder / part / f"{BORDERS}.npy", np.cumsum([0, *sizes_of_shards[part]], dtype=np.int64))
        for name, array in zip(COLUMNS, (names, labels, places), strict=True):
            np.save(folder / part / f"{name}.npy", array[order])
        sizes = places["size"][order].tolist()
        fingerprints[part] = fingerprint_of(labels[order], map(os.fsdecode, names[order].tolist()), sizes)
    content = {"classes": classes, "fingerprints": fingerprints, "passed_over": passed_over}
    (folder / "index.json").write_text(json.dumps(content), "utf-8")
