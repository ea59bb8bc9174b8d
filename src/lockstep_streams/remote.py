"""Shards on a server: which there are, their index, and the folder in which they are kept."""

import itertools
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.config.value_checks import place
from lockstep.errors import UserError
from lockstep.text import plural
from lockstep.vision.data.labelled import PARTS
from lockstep.vision.data.pixels import Reading
from lockstep.vision.data.walk import Walk, passed_over_text
from lockstep_streams.mds import INDEX, check_named, shards_in
from lockstep_streams.remote_index import CONNECTIONS, Records, open_remote
from lockstep_streams.server import REMEDY, UNKNOWN, Server, Stat, Unavailable
from lockstep_streams.shard_cache import GIB, ShardCache
from lockstep_streams.shard_files import Suffixes
from lockstep_streams.shard_index import Index, cache_folder, index_root
from lockstep_streams.shard_scan import EXTENSIONS, scan

BRACES = re.compile(r"\{([^{}]*)\}")
NEARLY = re.compile(r"\.(tar|parquet|mds)\.\w+$", re.IGNORECASE)  # old.tar.bak
MOST_SHARDS = 10_000_000  # that a pattern may name
MOST_ASKED = 10_000  # of these; of more shards, a run takes the index as it is


class Remote:
    """The shards at a URL.

    Args:
        data_dir: the URL, or a pattern of URLs with braces: `https://host/train-{000..099}.tar`.
        options: the arguments `image` and `label` of `scan`, and others.
        cache: the folder in which shards are kept; None: in the user's cache.
        cache_gb: its limit; None: a part of the disk stays free.
        retry_seconds: how long a request is tried again.
        index_dir: the folder for indexes; None: the user's cache.
        anew: whether the server is asked about all shards, whatever is known of them.

    Attributes:
        paths: of the shards, below the URL.
        passed_over: a text that counts files that are nearly called as shards.
        folder: in which they are kept.
    """

    def __init__(
        self,
        data_dir: str,
        options: Mapping[str, Any],
        cache: str | None = None,
        cache_gb: float | None = None,
        retry_seconds: float = 240.0,
        index_dir: str | None = None,
        anew: bool = False,
    ) -> None:
        if cache_gb is not None and (type(cache_gb) not in (int, float) or not 0 < cache_gb < float("inf")):
            raise UserError(f"data.cache_gb={cache_gb}: must be a number above 0, or null")
        if type(retry_seconds) not in (int, float) or not 0 <= retry_seconds < float("inf"):
            raise UserError(f"data.retry_seconds={retry_seconds}: must be a number of seconds of at least 0")
        self.data_dir, self.gigabytes, self.retry_seconds, self.index_dir = (
            place(data_dir),
            cache_gb,
            retry_seconds,
            index_dir,
        )
        self.folder = (Path(cache).expanduser().absolute() if cache else cache_folder()) / "shards"
        self.options = {name: options[name] for name in ("image", "label")}
        if "*" in self.data_dir:
            right = "name the shards with braces, train-{000..099}.tar, or give their folder"
            raise UserError(f"data_dir={self.data_dir} has a *, which is not expanded: {right}")
        base, pattern = split_pattern(self.data_dir)
        self.server = Server(base, retry_seconds)
        self.records = Records(self.server, self.options, index_root(index_dir), self.cache_of(None), anew)
        named = expanded(pattern) if pattern else None
        self.stats: Mapping[str, Stat] = self._listed(named)
        unknown = [path for path, stat in self.stats.items() if stat == UNKNOWN]
        if len(unknown) > MOST_ASKED and not anew:
            unknown = []
        if unknown:
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                answers = pool.map(lambda path: self.server.tried(partial(self.server.stat, path), path), unknown)
                self.stats = {**self.stats, **dict(zip(unknown, answers, strict=True))}
        self.paths = [*self.stats]

    def _listed(self, named: Sequence[str] | None) -> Mapping[str, Stat]:
        """Return the shards with what the server says of them.

        Args:
            named: the paths that a pattern names; None: there is no pattern.
        """
        from lockstep_streams.shards import SHARD

        self.passed_over = ""
        if named is not None:
            return dict.fromkeys(named, UNKNOWN)
        if self.server.lists:
            files = {
                path: stat
                for path, stat in self.server.files().items()
                if not any(each.startswith(".") for each in path.split("/"))
            }
            shards = {path: stat for path, stat in files.items() if SHARD.search(path)}
            others = Walk()
            for path in files.keys() - shards.keys():
                if NEARLY.search(path):
                    others.pass_over(path.rpartition("/")[2])
            self.passed_over = passed_over_text(others.passed_over, EXTENSIONS)
            described = [path for path in files if path.rpartition("/")[2] == INDEX]
            self.records.hashes = check_named(self.server.url, [*shards, *described], self._description)
            return shards
        return self._of_mds()

    def _of_mds(self) -> dict[str, Stat]:
        """Return the shards that files index.json of MDS name, on a server that lists nothing."""
        url = self.server.url
        shards: dict[str, Stat] = {}
        for folder in ("", *(f"{part}/" for part in PARTS)):
            description = self._description(folder + INDEX)
            if description is not None:
                for name, hashes in shards_in(description, f"{url}/{folder}{INDEX}").items():
                    shards[f"{folder}{name}"] = UNKNOWN
                    self.records.hashes[f"{folder}{name}"] = hashes
        if not shards:
            right = f"give a pattern, such as {url}/train-{{000..099}}.tar"
            raise UserError(f"shards: {url} has no list of its files that could be read: {right}")
        return shards

    def _description(self, path: str) -> bytes | None:
        """Return the content of a file index.json; None: there is none."""
        try:
            return self.server.read_small(path)
        except Unavailable as error:
            raise UserError(f"{self.server.url}: {error}: {REMEDY}") from error

    def cache_of(self, table: NDArray[Any] | None) -> ShardCache:
        """Return the cache of the shards of a table. Each has its own connection."""
        remedy = f"make the index again by `lockstep index {self.data_dir}`, and start a new run"
        server = Server(self.server.url, self.retry_seconds)
        pack = partial(packed_again, self.options["image"], self.options["label"])
        return ShardCache(server, table, self.folder, self.gigabytes, pack, remedy)

    def open(
        self,
        of_part: Mapping[str, Sequence[str]],
        options: Mapping[str, Any],
        image_size: int,
        channels: int,
        reading: Reading,
    ) -> Index:
        """Open the index, see `open_remote`."""
        shards = {part: {path: self.stats[path] for path in paths} for part, paths in of_part.items()}
        where = (self.data_dir, shards, self.records, options, self.index_dir)
        return open_remote(*where, image_size, channels, reading, self.cache_of)

    def check_room(self, index: Index, window: int | None) -> None:
        """Refuse a limit of the cache that is too small.

        Raises:
            UserError: It is below the largest shard; below all shards, and there is no window; or below the shards that
                one piece may read at a time. How many pieces this machine has is not known here.
        """
        if self.gigabytes is None:
            return
        sizes = [images.cache.table["cached_bytes"] for images in index.parts.values()]  # type: ignore[attr-defined]
        largest, total = max(int(each.max()) for each in sizes), sum(int(each.sum()) for each in sizes)
        limit = f"data.cache_gb={self.gigabytes:g}"
        if largest > self.gigabytes * GIB:
            raise UserError(f"{limit}: the largest shard alone takes {largest / GIB:.3g} GB: give more")
        if window is not None:
            at_a_time = int(np.sort(sizes[0])[-window:].sum())  # of the training set, the first part
            if at_a_time > self.gigabytes * GIB:
                each = f"a piece reads {plural(window, 'shard')} at a time, which may take {at_a_time / GIB:.3g} GB"
                raise UserError(f"{limit}: with data.window={window} {each}: give more, or a smaller data.window")
        if window is None and total > self.gigabytes * GIB:
            each = f"the shards take {total / GIB:.3g} GB, and without data.window every step reads from all of them"
            raise UserError(f"{limit}: {each}: give data.window=4, say, or more room")


def packed_again(image: Suffixes, label: str | None, where: str, source: Path, target: Any) -> None:
    """Write the images of a packed shard, as when it was indexed; see `Examine` of the cache."""
    scan(where, image, label, source, target)


def split_pattern(url: str) -> tuple[str, str]:
    """Return the URL before the first part of a path with braces, and the rest; an empty text without braces."""
    from lockstep_streams.shards import SHARD

    at = url.find("{")
    if at < 0:
        return url.rpartition("/")[::2] if SHARD.search(url) else (url, "")  # the URL of a shard names it
    base, _, begin = url[:at].rpartition("/")
    return base, begin + url[at:]


def expanded(pattern: str) -> list[str]:
    """Return the paths that a pattern names: `{000..099}` stands for numbers, `{train,val}` for words.

    Raises:
        UserError: The braces hold something else.
    """
    choices: list[Sequence[str]] = []
    count = 1
    for number, part in enumerate(BRACES.split(pattern)):
        if number % 2 == 0:
            if "{" in part or "}" in part:
                raise UserError(f"data_dir: the braces of {pattern} don't fit: must be {{000..099}} or {{train,val}}")
            choices.append([part])
            continue
        if match := re.fullmatch(r"(\d+)\.\.(\d+)(?:\.\.0*([1-9]\d*))?", part):
            first, last, step = match.groups()
            numbers = range(int(first), int(last) + 1, int(step or 1))
            width = len(first) if first.startswith("0") else 0
            if not numbers or len(numbers) * count > MOST_SHARDS:
                raise UserError(
                    f"data_dir: {{{part}}} names {plural(len(numbers), 'shard')}: must be the first and the last"
                )
            choices.append([f"{each:0{width}}" for each in numbers])
        elif "," in part:
            choices.append(part.split(","))
        else:
            raise UserError(f"data_dir: {{{part}}} is no pattern: must be {{000..099}} or {{train,val}}")
        count *= len(choices[-1])
    return list(dict.fromkeys("".join(each) for each in itertools.product(*choices)))
