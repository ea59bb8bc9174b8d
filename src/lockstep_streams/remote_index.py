"""The index of shards on a server.

`lockstep index`, or a run that finds no index, fetches each shard once and makes a record of its images. So making an
index can be interrupted and goes on, and only new shards are fetched later. `lockstep index` writes all records in two
files beside the shards, if it may. A run makes its own index of the records, once on a machine, and maps it.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import shutil
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lockstep.arithmetic.streams import ShardNeed
from lockstep.errors import UserError
from lockstep.files import replacing, write
from lockstep.text import join_names, plural
from lockstep.vision.data.labelled import CHECKED_FILES, UNREADABLE, LabelledFiles
from lockstep.vision.data.pixels import (
    TOO_DEEP,
    Reading,
    fewer_bits_text,
    highest_value,
    largest_value,
    open_image,
    too_deep,
    too_large_text,
)
from lockstep_streams.mds import Hashes, check_hashes
from lockstep_streams.server import REMEDY, Server, Stat, Unavailable, digest_of, is_same
from lockstep_streams.shard_cache import FULL, Known, ShardCache, Table
from lockstep_streams.shard_files import other_kind
from lockstep_streams.shard_index import (
    BORDERS,
    COLUMNS,
    Index,
    build,
    column,
    digest,
    first_writable,
    index_root,
    make_once,
    warn_of_unchecked,
)
from lockstep_streams.shard_scan import Scanned, scan

LOG = logging.getLogger("lockstep")
RECORD_VERSION, INDEX_VERSION = 2, 2  # of the records of shards, and of the index that is made of them
BESIDE = ".index"  # the folder of the records beside the shards
DAMAGED = (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, zipfile.BadZipFile)
MOST_LISTED = 10_000  # shards; with more, a run takes the records beside them without a listing
CHECKED_DEEP = 4  # images of 16 bits of a shard that are decoded
CONNECTIONS = 8  # shards that are indexed at the same time
SECONDS_BETWEEN = 10.0  # between two lines about the progress
READING = threading.Lock()  # see `arrays_in`


@dataclass(eq=False)
class RemoteImages(LabelledFiles):
    """Images in shards on a server. Whole shards are kept in a folder of the machine, and read there."""

    places: NDArray[Any]  # of dtype PLACE
    cache: ShardCache  # of the shards of this part
    first_file: int  # the number of its first shard in `places`
    sha256: str  # the fingerprint
    shard_borders: NDArray[np.int64] | None = None  # see `ShardImages`

    uses_random_numbers = False  # again, since Lockstep does not read it from a base class
    skip_hint = ""

    def name(self, index: int) -> str:
        return os.fsdecode(self.names[index])

    def location(self, index: int) -> str:
        known = self.cache.known(self.places[index]["file"] - self.first_file)
        return f"{self.cache.server.url}/{known.path}: image {self.name(index)}"

    def encoded(self, index: int) -> io.BytesIO:
        file, start, size = self.places[index].item()
        return io.BytesIO(self.cache.read(file - self.first_file, start, size))

    def sample(self, most: int) -> NDArray[np.int64]:
        """Return the numbers of images of one shard, so that no other is fetched for them."""
        files = self.places["file"]
        return np.flatnonzero(files == files[0])[:most]

    def fingerprint(self) -> str:
        return self.sha256

    def content_sha256(self) -> str:
        """See `content_of`. Images in other shards have another one."""
        return hashlib.sha256(np.ascontiguousarray(self.cache.table.sha256).data).hexdigest()  # type: ignore[union-attr]

    @property
    def read_ahead(self) -> int:
        """See `lockstep.data.streams.ReadsAhead`."""
        return self.cache.read_ahead

    def fetch_counts(self) -> dict[str, int]:
        """Return what this rank's processes have fetched; see `lockstep.data.streams.fetch_counts`."""
        return self.cache.counters.of_rank()

    def room_note(self, pieces: int, window: int) -> str:
        """See `lockstep.data.streams.room_note`."""
        return self.cache.room_note(pieces, window)

    def will_need(self, step: int, needs: Sequence[ShardNeed]) -> None:
        """See `lockstep.data.streams.ReadsAhead`."""
        self.cache.will_need(step, needs)


@dataclass
class Record:
    """A shard: what is known of it, and its images.

    Attributes:
        highest: the highest values of some images of 16 bits.
    """

    known: Known
    images: Scanned
    highest: list[int] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Return what is not in columns, for JSON."""
        known = {**self.known._asdict(), "highest": self.highest, "count": len(self.images.names)}
        return {**known, **self.images.facts()}

    @classmethod
    def from_columns(cls, arrays: dict[str, NDArray[Any]], facts: dict[str, Any]) -> "Record":
        """Return the record of which `facts` are; raise ValueError, TypeError or KeyError if they are others."""
        size, version = facts["stat"]
        if {"", ".", ".."} & set(str(facts["path"]).split("/")):
            raise ValueError("a shard is elsewhere")
        sha256 = str(facts["sha256"])
        if len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
            raise ValueError("a SHA-256 is none")
        known = Known(str(facts["path"]), (int(size), str(version)), int(facts["cached_bytes"]), sha256)
        images = Scanned.from_columns(arrays, facts)
        if len(images.names) and (images.starts + images.sizes).max() > known.cached_bytes:
            raise ValueError("an image is beyond its shard")
        return cls(known, images, [int(each) for each in facts["highest"]])


class DamagedRecords(UserError):
    """The records beside the shards are damaged."""


class Records:
    """The records of the shards on a server.

    Args:
        server: the server.
        options: the arguments `image` and `label` of `scan`, which the records depend on.
        folder: for the indexes of this machine.
        cache: keeps the shards that are fetched.
        anew: whether a shard of which the server tells no version is read again, whatever is known of it.
    """

    def __init__(
        self, server: Server, options: Mapping[str, Any], folder: Path, cache: ShardCache, anew: bool = False
    ) -> None:
        self.server, self.options, self.cache, self.anew = server, options, cache, anew
        self.key = digest([RECORD_VERSION, dict(options)])[:16]
        self.folder = folder / digest(server.url)[:16] / f"records-{self.key}"
        self.beside = f"{BESIDE}/records-{self.key}"  # with the endings .json and .npz
        self.hashes: dict[str, Hashes] = {}  # of some shards, in files index.json of MDS
        self.unchecked: set[str] = set()  # kinds of hashes that can't be computed here
        self.shards = 1  # their number, which decides how many images of each are checked
        # Of the records beside the shards:
        self._number_of: dict[str, int] = {}  # of each shard, by path
        self._table: dict[str, NDArray[Any]] = {}  # columns with a row for each shard
        self._texts: dict[str, Any] = {}
        self._borders: NDArray[Any] = np.zeros(1)  # the first image of each shard
        self._columns: dict[str, NDArray[Any]] = {}  # with a row for each image
        self._lock = threading.Lock()
        self._files: dict[str, Known] = {}

    def published(self) -> dict[str, Stat] | None:
        """Return the shards of which there are records beside the shards; None: there are none.

        If they are read anew, damaged records beside the shards are none.

        Raises:
            UserError: The server does not answer, or a file is damaged.
        """
        try:
            content = self.server.read_small(f"{self.beside}.json")
        except Unavailable as error:
            raise UserError(f"{self.server.url}: {error}: {REMEDY}") from error
        if content is None or other_kind(content[:512]):  # a server may send a page for what is missing
            return None
        try:
            return self._read_published(content)
        except UserError as error:
            if not self.anew:
                raise
            self._forget_published(error)
            return None

    def _forget_published(self, error: UserError) -> None:
        LOG.warning("%s", f"{error}; its shards are read again".replace("\n", " "))
        self._number_of = {}

    def _read_published(self, content: bytes) -> dict[str, Stat]:
        """Return what `published` returns, from the description of the records."""
        try:
            described = json.loads(content)
            self._files = {
                name: Known(self._beside(name, sha256), (size := int(described[name]["bytes"]), ""), size, sha256)
                for name in ("shards", "images")
                if re.fullmatch("[0-9a-f]{64}", sha256 := str(described[name]["sha256"]))
            }
            table = arrays_in(self.cache.fetch(self._files["shards"]))
            self._texts = json.loads(table.pop("texts").tobytes())
            self._table = table
            self._borders = np.cumsum([0, *table["counts"].tolist()])
            paths = [os.fsdecode(path) for path in table["paths"].tolist()]
            if any({"", ".", ".."} & set(path.split("/")) for path in paths):
                raise ValueError("a shard is elsewhere")
            stats = zip(table["sizes"].tolist(), table["versions"].tolist(), strict=True)
            shards = dict(zip(paths, ((size, version.decode()) for size, version in stats), strict=True))
            self._number_of = {path: number for number, path in enumerate(paths)}
            return shards
        except DAMAGED as error:
            raise self._damaged(error) from error

    def _beside(self, name: str, sha256: str) -> str:
        """Return the path of a file of records beside the shards.

        It has its own hash in its name, so that the description, which is written last, always fits.
        """
        return f"{self.beside}-{name}-{sha256[:16]}.npz"

    def _damaged(self, error: Exception) -> "DamagedRecords":
        remedy = f"remove it, or make it again by `lockstep index {self.server.url}`"
        return DamagedRecords(f"{self.server.url}/{self.beside}: damaged ({error}): {remedy}")

    def of(self, path: str, stat: Stat) -> Record:
        """Return the record of a shard. Make it if there is none, or if it is of another version of the shard.

        Raises:
            UserError: The shard can't be fetched, or is damaged.
        """
        if self.anew and not stat[1]:
            return self._made(path, stat)
        try:
            return self._local(path, stat) or self._of_published(path, stat) or self._made(path, stat)
        except DamagedRecords as error:
            if not self.anew:
                raise
            self._forget_published(error)
            return self._made(path, stat)

    def published_sha256(self, path: str, stat: Stat) -> str | None:
        """Return the SHA-256 of a shard in the records beside the shards; None: they don't have this version of it."""
        number = self._number_of.get(path)
        if number is None:
            return None
        known = self._known(path, number)
        return known.sha256 if is_same(stat, known.stat) else None

    def _file(self, path: str) -> Path:
        return self.folder / f"{digest(path)[:32]}.npz"

    def _local(self, path: str, stat: Stat) -> Record | None:
        try:
            record = self._read(self._file(path))
        except (OSError, ValueError, TypeError, KeyError, zipfile.BadZipFile):
            return None
        right = self.published_sha256(path, stat) in (None, record.known.sha256)
        return record if right and record.known.path == path and is_same(stat, record.known.stat) else None

    @staticmethod
    def _read(file: Path) -> Record:
        arrays = arrays_in(file)
        facts = json.loads(arrays.pop("facts").tobytes())
        return Record.from_columns(arrays, facts)

    def _of_published(self, path: str, stat: Stat) -> Record | None:
        number = self._number_of.get(path)
        if number is None:
            return None
        try:
            recorded, table = self._known(path, number), self._table
            if not is_same(stat, recorded.stat):
                return None
            with self._lock:
                self._columns = self._columns or self._fetched_columns()
            images = slice(self._borders[number], self._borders[number + 1])
            arrays = {name: values[images] for name, values in self._columns.items()}
            if len(arrays["names"]) != table["counts"][number]:
                raise ValueError("it has fewer images than shards should have")
            # the labels are numbered over all shards, and those of a shard in the order of appearance
            numbers, firsts, label_of = np.unique(arrays["label_of"], return_index=True, return_inverse=True)
            order = np.argsort(firsts)
            arrays["label_of"] = np.argsort(order)[label_of].astype(np.int32)
            facts = self._texts["kinds"][table["kind_of"][number]]
            labels = [self._texts["labels"][each] for each in numbers[order].tolist()]
            return Record.from_columns(arrays, {**facts, **recorded._asdict(), "labels": labels})
        except DAMAGED as error:
            raise self._damaged(error) from error

    def _known(self, path: str, number: int) -> Known:
        """Return what the records beside the shards know of a shard."""
        stat = int(self._table["sizes"][number]), self._table["versions"][number].decode()
        cached = int(self._table["cached_bytes"][number]), self._table["sha256"][number].decode()
        return Known(path, stat, *cached)

    def _fetched_columns(self) -> dict[str, NDArray[Any]]:
        try:
            images = self.cache.fetch(self._files["images"])
        except UserError as error:
            raise DamagedRecords(str(error)) from error
        arrays = arrays_in(images)
        return {name: arrays[name] for name in ("names", "label_of", "starts", "sizes")}

    def _made(self, path: str, stat: Stat) -> Record:
        """Fetch a shard, and make its record."""
        where = f"{self.server.url}/{path}"
        if stat[0] < 0:
            stat = self.server.tried(lambda: self.server.stat(path), where)
        known, (images, highest) = self.cache.fetch_new(path, stat, self.examined)
        record = Record(known, images, highest)
        facts = np.frombuffer(json.dumps(record.facts()).encode(), np.uint8)
        with contextlib.suppress(OSError), replacing(self._file(path)) as target:
            np.savez(target, facts=facts, **images.arrays())
        return record

    def examined(self, where: str, source: Path, target: IO[bytes]) -> tuple[Scanned, list[int]]:
        """Return the images of a shard, and the highest values of some of 16 bits. Refuse bad headers.

        It is an `Examine` of the cache.
        """
        images = Scanned.of(scan(where, self.options["image"], self.options["label"], source, target))
        hashes = self.hashes.get(where.removeprefix(f"{self.server.url}/"))
        if hashes:
            with open(source, "rb") as file:
                self.unchecked |= check_hashes(where, file, hashes)
        target.flush()
        highest: list[int] = []
        broken = []
        places = [*zip(images.names.tolist(), images.starts.tolist(), images.sizes.tolist(), strict=True)]
        checked = places[:: max(1, len(places) * self.shards // CHECKED_FILES)]
        for name, start, size in checked:
            at = os.fsdecode(name)
            try:
                with open_image(io.BytesIO(os.pread(target.fileno(), size, start))) as image:
                    if too_deep(image):
                        broken.append(f"{at} ({TOO_DEEP})")
                    elif largest_value(image) is not None and len(highest) < CHECKED_DEEP:
                        value = highest_value(image)
                        highest += [] if value is None else [value]
            except Image.DecompressionBombError as error:
                broken.append(f"{at} ({too_large_text(error)})")
            except UNREADABLE:
                broken.append(at)
        if broken:
            which = f"{len(broken):,} of {len(checked):,} images that were checked can't be read"
            raise UserError(
                f"{where}: {which}: {join_names(broken, 5)}: repair or remove {'it' if len(broken) == 1 else 'them'}"
            )
        return images, highest

    def all(self, shards: Mapping[str, Stat]) -> Iterator[Record]:
        """Yield the records of shards in order. Several are made at a time.

        Raises:
            UserError: as of `of`.
        """
        self.shards = max(1, len(shards))
        began, logged = time.monotonic(), time.monotonic()
        with ThreadPoolExecutor(CONNECTIONS, "index-shards") as pool:
            pending: list[Any] = []
            remaining = iter(shards.items())
            most = 2 * CONNECTIONS
            try:
                for number, shard in enumerate(shards.items()):
                    while len(pending) < most and (item := next(remaining, None)) is not None:
                        pending.append(pool.submit(self.of, *item))
                    try:
                        record = pending.pop(0).result()
                    except UserError as error:
                        if getattr(error.__cause__, "errno", None) not in FULL:
                            raise
                        most = 1  # a small disk may have room for one shard at a time
                        wait(pending)
                        record = self.of(*shard)
                    yield record
                    if time.monotonic() - logged > SECONDS_BETWEEN:
                        logged = time.monotonic()
                        LOG.info("indexed %d of %d shards in %.0f s", number + 1, len(shards), logged - began)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        warn_of_unchecked(self.unchecked)

    def publish(self, records: Sequence[Record]) -> None:
        """Write records beside the shards; raise `Unavailable` if that is not allowed."""
        label_numbers: dict[str, int] = {}
        kinds: dict[str, int] = {}
        kind_of = []
        columns = []
        for record in records:
            numbers = [label_numbers.setdefault(label, len(label_numbers)) for label in record.images.labels]
            label_of = np.array(numbers, np.int32)[record.images.label_of]
            columns.append({**record.images.arrays(), "label_of": label_of})
            facts = {**record.images.facts(), "highest": record.highest}
            del facts["labels"]
            kind_of.append(kinds.setdefault(json.dumps(facts, sort_keys=True), len(kinds)))
        texts = {"labels": [*label_numbers], "kinds": [json.loads(kind) for kind in kinds]}
        shards: Any = {
            **Table.of([record.known for record in records]).columns(),
            "counts": np.array([len(record.images.names) for record in records], np.int64),
            "kind_of": np.array(kind_of, np.int32),
            "texts": np.frombuffer(json.dumps(texts).encode(), np.uint8),
        }
        images: Any = {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}
        described = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, arrays in {"images": images, "shards": shards}.items():
            file = self.folder / f"all-{name}.npz"
            with replacing(file) as target:
                np.savez(target, **arrays)
            with open(file, "rb") as written:
                described[name] = {"sha256": (sha256 := digest_of(written, "sha256")), "bytes": file.stat().st_size}
            self.server.write(self._beside(name, sha256), file)
            file.unlink()
        description = self.folder / "all.json"
        write(description, json.dumps(described).encode())
        self.server.write(f"{self.beside}.json", description)
        description.unlink()


def arrays_in(file: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an npz file.

    One thread at a time reads: numpy parses the headers by `ast`, in which threads of Python 3.11 disturb each other
    (CPython #106905).
    """
    with READING, np.load(file, allow_pickle=False) as content:
        return {name: content[name] for name in content.files}


def open_remote(
    data_dir: str,
    shards: Mapping[str, Mapping[str, Stat]],
    records: Records,
    options: Mapping[str, Any],
    index_dir: str | None,
    image_size: int,
    channels: int,
    reading: Reading,
    cache_of: Callable[[Table], ShardCache],
) -> Index:
    """Open the index of shards on a server, and make it first if there is none, or if a shard has changed.

    Args:
        data_dir: the URL that the user gives.
        shards: the paths of each part with what the server says of them, the training part first.
        records: of these shards.
        options: see `open_index`.
        index_dir: the folder for indexes; None: the user's cache.
        image_size: pixels.
        channels: 1 or 3.
        reading: how pixels are read.
        cache_of: makes the cache of a part's shards.

    Raises:
        UserError: A shard or an image is damaged, a column is missing, or the index can't be written.
    """
    server = records.server
    listed = {path: stat for paths in shards.values() for path, stat in paths.items()}
    options_prefix = f"shards-{digest([INDEX_VERSION, dict(options)])[:16]}"
    rows = {
        part: [(path, stat, records.published_sha256(path, stat)) for path, stat in paths.items()]
        for part, paths in shards.items()
    }
    name = f"{options_prefix}-{digest([rows])[:24]}"

    def fill(new_folder: Path) -> None:
        LOG.info("%s: indexing %s in %s, once", server.url, plural(len(listed), "shard"), new_folder.parent)
        known: list[Known] = []
        highest: list[int] = []

        def scanned() -> Iterator[Scanned]:
            for record in records.all(listed):
                known.append(record.known)
                highest.extend(record.highest)
                yield record.images

        names = {part: [f"{server.url}/{path}" for path in paths] for part, paths in shards.items()}
        build(new_folder, names, options, scanned())
        for column_name, array in Table.of(known).columns().items():
            np.save(new_folder / f"{column_name}.npy", array)
        write(new_folder / "highest.json", json.dumps(highest).encode())

    def load(folder: Path) -> Index:
        try:
            content = json.loads((folder / "index.json").read_text("utf-8"))
            highest = json.loads((folder / "highest.json").read_text("utf-8"))
            table = [column(folder / f"{each.name}.npy") for each in fields(Table)]
            parts: dict[str, Any] = {}
            first = 0
            for part, sha256 in content["fingerprints"].items():
                names, labels, places = (column(folder / part / f"{each}.npy") for each in COLUMNS)
                borders = column(folder / part / f"{BORDERS}.npy") if options.get("by_place") else None
                stop = first + len(shards[part])
                cache = cache_of(Table(*(each[first:stop] for each in table)))
                values = (Path(), names, labels, image_size, channels, places, cache, first, sha256, borders)
                parts[part] = RemoteImages(*values, reading=reading)
                first = stop
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder}: damaged index ({error}): remove it, and it is made again") from error
        if highest and reading.bits is None and (fault := fewer_bits_text(highest)):
            raise UserError(f"{server.url}: {fault}")
        return Index(folder, parts, content["classes"], Counter(content["passed_over"]))

    parent = first_writable([index_root(index_dir) / digest(data_dir)[:16]])
    make_once(parent / name, fill)
    for index_folder in parent.glob(f"{options_prefix}-*"):
        if index_folder.name != name:  # made before the shards changed
            shutil.rmtree(index_folder, ignore_errors=True)
    return load(parent / name)
