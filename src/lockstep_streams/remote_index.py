"""The index of shards on a server.

A run that finds no index, or `lockstep index`, fetches each shard once and makes a record of its images. The index is
made of the records, once on a machine, and mapped into memory.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lockstep.arithmetic.streams import ShardNeed
from lockstep.errors import UserError
from lockstep.files import write
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
from lockstep_streams.server import Server, Stat, is_same
from lockstep_streams.shard_cache import FULL, Known, ShardCache, table_of
from lockstep_streams.shard_files import Shard
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
from lockstep_streams.shard_scan import scan

LOG = logging.getLogger("lockstep")
RECORD_VERSION, INDEX_VERSION = 3, 3  # of the records of shards, and of the index that is made of them
CHECKED_DEEP = 4  # images of 16 bits of a shard that are decoded
CONNECTIONS = 8  # shards that are indexed at the same time
SECONDS_BETWEEN = 10.0  # between two lines about the progress


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
        assert self.cache.table is not None
        return hashlib.sha256(np.ascontiguousarray(self.cache.table["sha256"]).data).hexdigest()

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


class Records:
    """Reads each shard on a server once, and keeps a record of it on this machine: a file with `Known` and `Shard`.

    So making an index can be interrupted and goes on, and later only new shards are fetched.

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
        self.folder = folder / digest(server.url)[:16] / f"records-{digest([RECORD_VERSION, dict(options)])[:16]}"
        self.hashes: dict[str, Hashes] = {}  # of some shards, in files index.json of MDS
        self.unchecked: set[str] = set()  # kinds of hashes that can't be computed here
        self.shards = 1  # their number, which decides how many images of each are checked

    def of(self, path: str, stat: Stat) -> tuple[Known, Shard]:
        """Return the record of a shard. Make it if there is none, or if it is of another version of the shard.

        Raises:
            UserError: The shard can't be fetched, or is damaged.
        """
        file = self.folder / f"{digest(path)[:32]}.json"
        if stat[1] or not self.anew:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
                content = json.loads(file.read_text("utf-8"))
                known = Known(**{**content["known"], "stat": tuple(content["known"]["stat"])})
                if known.path == path and is_same(stat, known.stat):
                    return known, Shard.from_json(content["shard"])
        if stat[0] < 0:
            stat = self.server.tried(lambda: self.server.stat(path), f"{self.server.url}/{path}")
        known, shard = self.cache.fetch_new(path, stat, self.examined)
        with contextlib.suppress(OSError):
            write(file, json.dumps({"known": known._asdict(), "shard": asdict(shard)}).encode())
        return known, shard

    def examined(self, where: str, source: Path, target: IO[bytes]) -> Shard:
        """Return the images of a shard. Refuse bad headers. It is an `Examine` of the cache."""
        shard = scan(where, self.options["image"], self.options["label"], source, target)
        hashes = self.hashes.get(where.removeprefix(f"{self.server.url}/"))
        if hashes:
            with open(source, "rb") as file:
                self.unchecked |= check_hashes(where, file, hashes)
        target.flush()
        broken = []
        checked = shard.samples[:: max(1, len(shard.samples) * self.shards // CHECKED_FILES)]
        for each in checked:
            try:
                with open_image(io.BytesIO(os.pread(target.fileno(), each.size, each.start))) as image:
                    if too_deep(image):
                        broken.append(f"{each.name} ({TOO_DEEP})")
                    elif largest_value(image) is not None and len(shard.highest) < CHECKED_DEEP:
                        value = highest_value(image)
                        shard.highest += [] if value is None else [value]
            except Image.DecompressionBombError as error:
                broken.append(f"{each.name} ({too_large_text(error)})")
            except UNREADABLE:
                broken.append(each.name)
        if broken:
            which = f"{len(broken):,} of {len(checked):,} images that were checked can't be read"
            raise UserError(
                f"{where}: {which}: {join_names(broken, 5)}: repair or remove {'it' if len(broken) == 1 else 'them'}"
            )
        return shard

    def all(self, shards: Mapping[str, Stat]) -> Iterator[tuple[Known, Shard]]:
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


def open_remote(
    data_dir: str,
    shards: Mapping[str, Mapping[str, Stat]],
    records: Records,
    options: Mapping[str, Any],
    index_dir: str | None,
    image_size: int,
    channels: int,
    reading: Reading,
    cache_of: Callable[[NDArray[Any]], ShardCache],
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
    name = f"{options_prefix}-{digest([{part: [*paths.items()] for part, paths in shards.items()}])[:24]}"

    def fill(new_folder: Path) -> None:
        LOG.info("%s: indexing %s in %s, once", server.url, plural(len(listed), "shard"), new_folder.parent)
        known: list[Known] = []
        highest: list[int] = []

        def scanned() -> Iterator[Shard]:
            for of_shard, shard in records.all(listed):
                known.append(of_shard)
                highest.extend(shard.highest)
                yield shard

        names = {part: [f"{server.url}/{path}" for path in paths] for part, paths in shards.items()}
        build(new_folder, names, options, scanned())
        np.save(new_folder / "shards.npy", table_of(known))
        write(new_folder / "highest.json", json.dumps(highest).encode())

    def load(folder: Path) -> Index:
        try:
            content = json.loads((folder / "index.json").read_text("utf-8"))
            highest = json.loads((folder / "highest.json").read_text("utf-8"))
            table = column(folder / "shards.npy")
            parts: dict[str, Any] = {}
            first = 0
            for part, sha256 in content["fingerprints"].items():
                names, labels, places = (column(folder / part / f"{each}.npy") for each in COLUMNS)
                borders = column(folder / part / f"{BORDERS}.npy") if options.get("by_place") else None
                stop = first + len(shards[part])
                cache = cache_of(table[first:stop])
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
