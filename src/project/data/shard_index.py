"""The index of shards: where each image lies, so that any of them can be read without those before it.

It is made once, and its columns are mapped into memory. So opening it takes as long with ten million samples as with
ten, and processes share its pages. tar files are read where they lie. Parquet files are compressed in groups of rows,
so their images are copied once, into a file beside the index.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep import UserError, plural
from project.data.labelled import LabelledFiles, check_headers, fingerprint_of
from project.data.shard_files import IMAGES, MEMBERS, scan_parquet, scan_tar

VERSION = 1  # of the index's form
COLUMNS = ("names", "labels", "places")
PLACE = np.dtype([("file", "<i4"), ("start", "<i8"), ("size", "<i8")])
LONGEST = 200  # characters of a label
Stamp = tuple[int, int]  # size and time of the last change of a file


@dataclass(eq=False)
class ShardImages(LabelledFiles):
    """Images in shards, in the order of their classes and names. Each is read by one `pread`."""

    places: NDArray[Any]  # of dtype PLACE
    files: Sequence[Path]
    stamps: Sequence[Stamp]
    sha256: str

    uses_random_numbers = False
    otherwise = ""

    def name(self, index: int) -> str:
        return os.fsdecode(self.names[index])

    def where(self, index: int) -> str:
        return f"{self.files[self.places[index]['file']]}: image {self.name(index)}"

    def encoded(self, index: int) -> io.BytesIO:
        file, start, size = self.places[index].item()
        file = -1 if self.files[file].suffix == ".parquet" else file  # the last file has the images of parquet files
        path = self.files[file]
        try:
            with open(path, "rb", buffering=0) as shard:
                if stamp(os.fstat(shard.fileno())) != self.stamps[file]:
                    raise UserError(f"{path}: changed after it was indexed: start again, and it is indexed again")
                return io.BytesIO(os.pread(shard.fileno(), size, start))
        except (OSError, OverflowError, MemoryError) as error:
            raise UserError(f"{self.where(index)} can't be read ({error})") from error

    def fingerprint(self) -> str:
        return self.sha256


@dataclass(frozen=True)
class Index:
    """An index that is ready.

    Attributes:
        folder: its folder.
        parts: the images of each part.
        classes: names of the classes.
    """

    folder: Path
    parts: dict[str, ShardImages]
    classes: list[str]

    def arrays(self, name: str, compute: Callable[[], Sequence[NDArray[np.int64]]]) -> list[NDArray[np.int64]]:
        """Return arrays that are computed at the first call with this name, and then mapped into memory."""

        def fill(new: Path) -> None:
            for number, array in enumerate(compute()):
                np.save(new / f"{number}.npy", array)

        folder = self.folder / name
        if not folder.is_dir() and not os.access(self.folder, os.W_OK):
            return [*compute()]
        make_once(folder, fill)
        return [column(path) for path in sorted(folder.glob("*.npy"))]


def open_index(
    root: Path,
    shards: Mapping[str, Sequence[Path]],
    options: Mapping[str, Any],
    index_dir: str | None,
    image_size: int,
    channels: int,
) -> Index:
    """Open the index of shards, and make it first if there is none, or if a shard has changed.

    Args:
        root: the folder of the shards.
        shards: the files of each part, the training part first.
        options: `image` and `label`, as of `scan_tar` and `scan_parquet`.
        index_dir: the folder for indexes; None: `.index` in `root`, or the user's cache if `root` can't be written.
        image_size: pixels.
        channels: 1 or 3.

    Raises:
        UserError: A shard or an image is damaged, a column is missing, or the index can't be written.
    """
    files = [*chain(*shards.values())]
    stamps = [stamp(file.stat()) for file in files]
    listed = {part: [str(file.relative_to(root)) for file in paths] for part, paths in shards.items()}
    kind = f"shards-{digest([VERSION, dict(options)])[:16]}"
    name = f"{kind}-{digest([listed, stamps])[:24]}"

    def load(folder: Path) -> Index:
        packed = [path for path in [folder / "images.bin"] if path.is_file()]
        all_stamps = [*stamps, *(stamp(path.stat()) for path in packed)]
        try:
            about = json.loads((folder / "index.json").read_text("utf-8"))
            parts = {}
            for part, sha256 in about["fingerprints"].items():
                names, labels, places = (column(folder / part / f"{each}.npy") for each in COLUMNS)
                of_part = (root, names, labels, image_size, channels, places, [*files, *packed], all_stamps, sha256)
                parts[part] = ShardImages(*of_part)
            return Index(folder, parts, about["classes"])
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{folder}: damaged index ({error}): remove it, and it is made again") from error

    def fill(new: Path) -> None:
        logging.getLogger("lockstep").info("indexing %s in %s, once", plural(len(files), "shard"), new.parent)
        build(new, shards, options)
        check_headers([*load(new).parts.values()])

    place = digest(str(root.resolve()))[:16]
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lockstep")
    homes = [Path(index_dir).expanduser().absolute() / place] if index_dir else [root / ".index", user / place]
    home = next((each for each in homes if (each / name).is_dir()), None) or first_writable(homes)
    make_once(home / name, fill)
    for old in home.glob(f"{kind}-*"):  # of these shards before they changed
        if old.name != name:
            shutil.rmtree(old, ignore_errors=True)
    return load(home / name)


def first_writable(folders: Sequence[Path]) -> Path:
    """Return the first of some folders that can be written, and make it if it is missing.

    Raises:
        UserError: There is none.
    """
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            reason = error.strerror
    raise UserError(f"{folder} can't hold an index ({reason}): use data.index_dir=<a folder that can be written>")


def stamp(stat: os.stat_result) -> Stamp:
    return stat.st_size, stat.st_mtime_ns


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def column(path: Path) -> NDArray[Any]:
    """Return an array that is mapped into memory. Nothing is unpickled."""
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def make_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder by `fill`, which writes to a folder that is renamed at the end. One process makes it, others wait.

    Raises:
        UserError: It can't be written.
    """
    new = folder.with_name(f".new_{os.getpid()}")
    if folder.is_dir():
        return
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # a link in a stranger's folder may point anywhere
        with open(os.open(folder.parent / ".lock", flags, 0o666), "wb") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: then several make it, and the first wins
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.is_dir():
                return
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            try:
                fill(new)
                for path in new.rglob("*.*"):
                    with open(path, "rb") as file:
                        os.fsync(file)
                os.rename(new, folder)
            finally:
                shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        if not folder.is_dir():
            where = f"{folder.parent}: can't be written ({error.strerror})"
            raise UserError(f"{where}: free space, or use another data.index_dir") from error


def build(folder: Path, shards: Mapping[str, Sequence[Path]], options: Mapping[str, Any]) -> None:
    """Write an index of shards to a folder.

    The samples of a part are sorted by class and name, as those of `image_folder`. So the order does not depend on how
    the images are distributed to shards.
    """
    number_of: dict[str, int] = {}  # of a label, in the order of appearance
    first: tuple[Path, Any] | None = None
    rows: dict[str, list[tuple[NDArray[Any], ...]]] = {part: [] for part in shards}
    files = ((part, path) for part, paths in shards.items() for path in paths)
    with open(folder / "images.bin", "wb") as packed:
        for number, (part, path) in enumerate(files):
            is_parquet = path.suffix == ".parquet"
            shard = scan_parquet(path, **options, packed=packed) if is_parquet else scan_tar(path, **options)
            if not shard.samples:
                continue
            first = first or (path, shard.classes)
            if shard.classes != first[1]:
                raise UserError(f"{path}: its labels are of another kind than those of {first[0]}: they must be of one")
            if odd := [each for each in shard.samples if len(each.label) > LONGEST or not each.label.isprintable()]:
                raise UserError(f"{path}: the label of {odd[0].name} is no class: it must be one line, and short")
            names = np.array([os.fsencode(each.name) for each in shard.samples])
            labels = np.array([number_of.setdefault(each.label, len(number_of)) for each in shard.samples])
            places = np.array([(number, each.start, each.size) for each in shard.samples], dtype=PLACE)
            rows[part].append((names, labels, places))
    if not (folder / "images.bin").stat().st_size:
        (folder / "images.bin").unlink()
    for part, paths in shards.items():
        if not rows[part]:
            raise UserError(f"{paths[0]}: no image in it: known are {', '.join(IMAGES)}")
    assert first is not None
    classes = in_order(first[1], number_of)
    position = {label: number for number, label in enumerate(classes)}
    numbers = np.array([position[label] for label in number_of])
    known: NDArray[np.int64] | None = None
    fingerprints = {}
    for part, of_shards in rows.items():
        names, labels, places = (np.concatenate(each) for each in zip(*of_shards, strict=True))
        present = np.unique(labels)
        known = present if known is None else known
        if len(others := np.setdiff1d(present, known)) and isinstance(first[1], str):
            what = f"only {part} has the class {[*number_of][others[0]]}"
            raise UserError(f"{shards[part][0].parent}: {what}: {next(iter(rows))} must have it, too")
        labels = numbers[labels]
        order = np.lexsort((names, labels))
        (folder / part).mkdir()
        for name, array in zip(COLUMNS, (names, labels, places), strict=True):
            np.save(folder / part / f"{name}.npy", array[order])
        sizes = places["size"][order].tolist()
        fingerprints[part] = fingerprint_of(labels[order], map(os.fsdecode, names[order].tolist()), sizes)
    (folder / "index.json").write_text(json.dumps({"classes": classes, "fingerprints": fingerprints}), "utf-8")


def in_order(known: str | tuple[str, ...], labels: Collection[str]) -> list[str]:
    """Return the names of the classes: those known, else folders by name, and other labels by number if they have."""
    if not isinstance(known, str):
        return [*known]
    if known == MEMBERS and all(map(str.isdecimal, labels)):
        return sorted(labels, key=int)
    return sorted(labels)
