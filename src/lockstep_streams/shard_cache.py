"""Keep whole shards of a server in a folder of the machine, for all its processes and runs.

A shard is kept under the SHA-256 of its content, which the index has. So runs share what they keep, a shard that was
replaced is another file, and what arrives is checked. A process that fetches a shard writes a temporary file, which is
renamed at the end. It holds a lock meanwhile, which ends with its process; others wait for the lock.
"""

import contextlib
import errno
import hashlib
import math
import mmap
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from lockstep.arithmetic.streams import ShardNeed
from lockstep.errors import UserError
from lockstep.files import locked
from lockstep.launch.environment import environment
from lockstep_streams.server import REMEDY, Server, Stat, Unavailable, digest_of, is_same, md5_of
from lockstep_streams.shard_scan import is_packed

FULL = (errno.ENOSPC, errno.EDQUOT)
ABANDONED = 3600  # seconds, after which a temporary file that nobody has written belongs to no process
REPEATS = 6  # whether the version of a shard changes back
THREADS = 4  # of a process, that fetch ahead
FIRST_AHEAD, MOST_AHEAD = 4, 64  # shards
GIB = 1 << 30
LEFT_FREE = 0.05  # of the disk, without a limit
NOTED_EVERY = 10.0  # seconds between two notes that a shard is being used
# The time of change, in ns, of files that were checked and not touched since. It is an even number of
# seconds after 1980, since some file systems keep no other.
WHOLE = 1_000_000_000 * 10**9
COUNTS = ("bytes", "fetched", "hits", "waits", "wait_ns", "retries")
WORKERS, RANKS = 65, 64  # slots of counters: each process of a rank has one


class Known(NamedTuple):
    """What the index knows of a shard."""

    path: str  # below the server's URL
    stat: Stat
    cached_bytes: int  # of the file that is kept
    sha256: str  # of that file


# Gets a shard's name for messages, its file, and the file that is kept, in which a packed shard's images are to be
# written. It may raise a UserError.
Examine = Callable[[str, Path, IO[bytes]], Any]


def table_of(known: Sequence[Known]) -> NDArray[Any]:
    """Return what is known of shards as an array with a row for each, which can be mapped into memory."""
    texts = [[os.fsencode(text) for text in (each.path, each.stat[1], each.sha256)] for each in known]
    paths, versions, hashes = (np.array(column, np.bytes_) for column in zip(*texts, strict=True))
    columns = {
        "path": paths,
        "size": np.array([each.stat[0] for each in known], np.int64),
        "version": versions,
        "cached_bytes": np.array([each.cached_bytes for each in known], np.int64),
        "sha256": hashes,
    }
    table = np.empty(len(known), [(name, column.dtype) for name, column in columns.items()])
    for name, column in columns.items():
        table[name] = column
    return table


class Counters:
    """Numbers that all processes of a machine add to; each has its own slot, so that none is lost."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 8 * len(COUNTS) * WORKERS * RANKS)
        self.lock = threading.Lock()

    def add(self, name: str, number: int = 1) -> None:
        worker = get_worker_info()
        slot = environment().rank % RANKS * WORKERS + (0 if worker is None else 1 + worker.id % (WORKERS - 1))
        values = np.frombuffer(self.memory, np.int64)
        with self.lock:
            values[slot * len(COUNTS) + COUNTS.index(name)] += number

    def of_rank(self) -> dict[str, int]:
        """Return the sums over this rank's processes."""
        values = np.frombuffer(self.memory, np.int64).reshape(RANKS, WORKERS, len(COUNTS))
        sums = values[environment().rank % RANKS].sum(axis=0)
        return dict(zip(COUNTS, sums.tolist(), strict=True))


class _OfProcess:
    """What a process has of a cache. A fork makes its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.seen: set[int] = set()  # shards that were read
        self.used: dict[str, float] = {}  # when the use of a shard was noted, by hash
        self.checked: set[tuple[str, int, int]] = set()  # files that others can write, and that were hashed
        self.announced: set[str] = set()  # hashes of the shards that this process reads now and next
        self.wanted: list[int] = []  # of these, those that no thread fetches yet
        self.futures: dict[int, Future[None]] = {}  # shards that are being fetched
        self.changed = threading.Condition(self.lock)
        self.threads: list[threading.Thread] = []


class ShardCache:
    """The kept shards of a server.

    Args:
        server: the server.
        table: what the index knows of its shards, see `table_of`.
        folder: the folder of the cache.
        gigabytes: its limit, of all runs that use it; None: a part of the disk stays free.
        pack: writes the images of a packed shard, see `Examine`.
        advice: what to do if a shard was replaced, for messages.
    """

    def __init__(
        self,
        server: Server,
        table: NDArray[Any] | None,
        folder: Path,
        gigabytes: float | None,
        pack: Examine,
        advice: str = "",
    ) -> None:
        self.server, self.table, self.folder, self.gigabytes = server, table, folder, gigabytes
        self.pack, self.advice = pack, advice
        self.read_ahead = FIRST_AHEAD
        self.counters = Counters()
        self._process = _OfProcess()
        server.on_retry = self._count_retry

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "counters": None, "_process": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, counters=Counters(), _process=_OfProcess())
        self.server.on_retry = self._count_retry

    def _count_retry(self) -> None:
        self.counters.add("retries")

    # --- reading ---

    def read(self, number: int, start: int, size: int) -> bytes:
        """Return bytes of what is kept of a shard. Fetch it first if it is not there.

        Raises:
            UserError: It can't be fetched.
        """
        process, known = self._state(), self.known(number)
        is_first = number not in process.seen
        process.seen.add(number)
        file = self._open_cached(known)
        if file is None:
            began = time.monotonic_ns()
            with process.lock:
                future = process.futures.get(number)
            if future is not None:
                future.result()
            while (file := self._open_cached(known)) is None:
                self._fetch(known)
            self.counters.add("waits")
            self.counters.add("wait_ns", time.monotonic_ns() - began)
            self.read_ahead = min(MOST_AHEAD, 2 * self.read_ahead)
        elif is_first:
            self.counters.add("hits")
        # It is opened for each read: a file that is open takes room after it was removed.
        try:
            return os.pread(file, size, start)
        finally:
            os.close(file)

    def _state(self) -> _OfProcess:
        if self._process.pid != os.getpid():
            self.server.after_fork()
            self.counters.lock = threading.Lock()
            self._process = _OfProcess()
        return self._process

    def known(self, number: int) -> Known:
        assert self.table is not None
        path, size, version, cached_bytes, sha256 = self.table[number].item()
        return Known(os.fsdecode(path), (size, version.decode()), cached_bytes, sha256.decode())

    def path(self, known: Known) -> Path:
        """Return the file in which a shard is kept."""
        return self.folder / known.sha256[:2] / known.sha256

    def _open_cached(self, known: Known) -> int | None:
        """Open what is kept of a shard, and note its use. Remove it if it is damaged. None: it is not there."""
        path, process = self.path(known), self._state()
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(
                f"{path}: can't be read ({error.strerror}): repair it, or use another data.cache"
            ) from error
        stat = os.fstat(file)
        # Only a file that nobody else could write tells by its time that it was checked.
        is_private = stat.st_uid == os.geteuid() and not stat.st_mode & 0o022
        key = (known.sha256, stat.st_ino, stat.st_mtime_ns)
        is_whole = stat.st_size == known.cached_bytes
        is_checked = (is_private and stat.st_mtime_ns == WHOLE) or key in process.checked
        if is_whole and not is_checked:
            with open(file, "rb", closefd=False) as opened:
                is_whole = digest_of(opened, "sha256") == known.sha256
        if not is_whole:
            os.close(file)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        now = time.monotonic()
        if not is_checked or now - process.used.get(known.sha256, -math.inf) > NOTED_EVERY:
            process.checked.add(key)
            process.used[known.sha256] = now
            with contextlib.suppress(OSError):  # the time of access says which was used last
                os.utime(file, ns=(time.time_ns(), WHOLE if is_private else stat.st_mtime_ns))
        return file

    # --- fetching ahead ---

    def room_note(self, pieces: int, window: int) -> str:
        """Return a line if the limit is below what some pieces read at the same time; else an empty text.

        Where pieces begin a window, their processes still read the one before. With room for one window each, shards
        were fetched 2.5 times in a trial, with room for two of them once.
        """
        if self.gigabytes is None or self.table is None:
            return ""
        needed = int(np.sort(self.table["cached_bytes"])[-2 * pieces * window :].sum()) / GIB
        if needed <= self.gigabytes:
            return ""
        of = f"the shards that the pieces of a machine ({pieces}) read at a time, and the next ones"
        right = "give as much, or shards are fetched again and again"
        return f"data.cache_gb={self.gigabytes:g}: {of}, take up to {needed:.3g} GB: {right}"

    def will_need(self, step: int, needs: Sequence[ShardNeed]) -> None:
        """Fetch shards in the background, in the order of `needs`; see `lockstep.data.streams.ReadsAhead`."""
        process = self._state()
        for each in reversed(needs):  # so that what is needed first counts as used last
            known = self.known(each.shard)
            with contextlib.suppress(OSError):
                path = self.path(known)
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
                process.used[known.sha256] = time.monotonic()  # the threads do not note it again, in their order
        with process.lock:
            process.announced = {self.known(each.shard).sha256 for each in needs}
            process.wanted = [each.shard for each in needs]
            process.changed.notify_all()
            while len(process.threads) < min(THREADS, len(needs)):
                thread = threading.Thread(target=self._fetch_ahead, args=(process,), daemon=True, name="fetch-shards")
                process.threads.append(thread)
                thread.start()

    def _fetch_ahead(self, process: _OfProcess) -> None:
        while True:
            with process.lock:
                while not process.wanted:
                    process.changed.wait()
                number = process.wanted.pop(0)
                if number in process.futures:
                    continue
                future = process.futures[number] = Future()
            try:
                known = self.known(number)
                file = self._open_cached(known)
                if file is None:
                    self._fetch(known, is_ahead=True)
                else:
                    os.close(file)
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)
            finally:
                with process.lock:
                    del process.futures[number]

    # --- fetching ---

    def fetch_new(self, path: str, stat: Stat, examine: Examine) -> tuple[Known, Any]:
        """Fetch a shard that is not in the index yet. Return what is known of it then, and what `examine` returns.

        Raises:
            UserError: It can't be fetched, or `examine` refuses it.
        """
        name = hashlib.sha256(f"{self.server.url}/{path}\0{stat}".encode()).hexdigest()
        results: list[Any] = []
        known = self._fetch(Known(path, stat, -1, name), examine=lambda *files: results.append(examine(*files)))
        return known, results[-1]

    def _fetch(self, known: Known, is_ahead: bool = False, examine: Examine | None = None) -> Known:
        """Fetch a shard, unless another process has just done so.

        Args:
            known: of the shard. If it is new, `sha256` is only a name for the lock.
            is_ahead: whether it is not needed yet. Then no shard that this process has announced is removed for it.
            examine: see `Examine`, for a shard that is not in the index.

        Raises:
            UserError: It can't be fetched.
        """
        size, unpacked = max(0, known.stat[0]), max(0, known.cached_bytes) if is_packed(known.path) else 0
        if self.gigabytes is not None and size + unpacked > self.gigabytes * GIB:
            where, needed = f"{self.server.url}/{known.path}", (size + unpacked) / GIB
            raise UserError(f"data.cache_gb={self.gigabytes:g}: {where} alone takes {needed:.3g} GB: give more")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / f"{known.sha256[:2]}.lock"), contextlib.ExitStack() as files:
                if examine is None and (cached := self._open_cached(known)) is not None:  # another has fetched it
                    os.close(cached)
                    return known
                with locked(self.folder / "room.lock"):
                    if not self._make_room(size + unpacked, is_ahead):
                        return known  # it is fetched when it is needed
                    file = target = files.enter_context(self._temporary(known, size))
                    if is_packed(known.path):
                        target = files.enter_context(self._temporary(known, unpacked))
                return self._complete(known, file, target, examine)
        except OSError as error:
            if error.errno in FULL:
                remedy = "free space, or give another data.cache or a smaller data.cache_gb"
                raise UserError(f"{self.folder}: no space for {known.path}: {remedy}") from error
            reason = error.strerror or error
            raise UserError(f"{self.folder}: can't be written ({reason}): give another data.cache=<folder>") from error

    @contextlib.contextmanager
    def _temporary(self, known: Known, size: int) -> Iterator[IO[bytes]]:
        """Open a new file, which others can't write. It is removed at the end, unless it was renamed.

        It has its later size from the start, so that other processes count it.
        """
        path = self.folder / f"{known.sha256}-{uuid.uuid4().hex}.part"
        try:
            with open(path, "x+b", opener=partial(os.open, mode=0o644)) as file:
                file.truncate(size)
                yield file
        finally:
            path.unlink(missing_ok=True)

    def _complete(self, known: Known, file: IO[bytes], target: IO[bytes], examine: Examine | None) -> Known:
        """Download a shard to a temporary file, check it, and give it its name.

        Args:
            known: of the shard.
            file, target: temporary files; `target`, for the images of a packed shard, is else the same.
            examine: see `_fetch`.
        """
        where, is_new = f"{self.server.url}/{known.path}", examine is not None
        if target is not file and examine is None:
            examine = self.pack
        digests: list[str] = []
        for is_last in (False, True):
            self._receive(known, file)
            if is_new and not self._is_what_was_sent(known, file, digests):
                continue
            try:
                if target is not file:
                    target.seek(0)
                    target.truncate()
                if examine is not None:
                    examine(where, Path(file.name), target)
                target.flush()
                sha256, size = digest_of(target, "sha256"), target.seek(0, os.SEEK_END)
                if is_new or sha256 == known.sha256:
                    if not is_new and size != known.cached_bytes:
                        wrong = f"{where}: has {size:,} bytes, and the index states {known.cached_bytes:,}"
                        raise UserError(f"{wrong}: {self.advice}")
                    stat = file.seek(0, os.SEEK_END), known.stat[1]
                    made = known._replace(sha256=sha256, cached_bytes=size, stat=stat)
                    self.path(made).parent.mkdir(exist_ok=True)
                    os.fsync(target.fileno())
                    with locked(self.folder / "room.lock"):  # else it looks abandoned to a process that makes room
                        os.utime(target.fileno(), ns=(time.time_ns(), WHOLE))
                        os.rename(target.name, self.path(made))
                    self.counters.add("fetched")
                    return made
            except UserError:
                if is_new or is_last:
                    raise
            self._refuse_replaced(known)
            if not is_last:
                self.counters.add("retries")
        if is_new:
            raise UserError(
                f"{where}: has arrived twice, with different bytes and another MD5 than the server states: {REMEDY}"
            )
        raise UserError(f"{where}: has arrived twice with another SHA-256 than that in the index: {self.advice}")

    def _receive(self, known: Known, file: IO[bytes]) -> None:
        """Write a shard of the server to a file."""
        file.seek(0)
        try:
            self.server.read(known.path, known.stat[0], partial(self._write, file))
        except Unavailable as error:
            self._refuse_replaced(known)
            raise UserError(f"{self.server.url}/{known.path}: {error}: {REMEDY}") from error
        file.truncate()
        self.counters.add("bytes", file.tell())

    def _write(self, file: IO[bytes], content: bytes) -> None:
        """Write to a file; if the disk is full, remove the shards that were used longest ago, and try again."""
        # Not by the file's buffer, which after an error still has the content, and would write it twice.
        start, done, view = file.tell(), 0, memoryview(content)
        for is_last in (False, True):
            try:
                while done < len(content):
                    done += os.pwrite(file.fileno(), view[done:], start + done)
                file.seek(start + done)
                return
            except OSError as error:
                if error.errno not in FULL or is_last:
                    raise
                with locked(self.folder / "room.lock"):
                    self._remove_oldest(len(content) + GIB, self._state().announced)

    def _is_what_was_sent(self, known: Known, file: IO[bytes], digests: list[str]) -> bool:
        """Check a new shard by the MD5 that most servers state. Refuse one that was replaced meanwhile.

        If the same bytes arrive twice, it is none: the ETag of an encrypted shard only looks like one.

        Args:
            known: of the shard.
            file: what has arrived.
            digests: the MD5 of what has arrived before; this one is added.
        """
        if (stated := md5_of(known.stat[1])) is not None:
            md5, before = digest_of(file, "md5"), [*digests]
            digests.append(md5)
            if md5 != stated and md5 not in before:
                self.counters.add("retries")
                return False
        self._refuse_replaced(known)
        return True

    def _refuse_replaced(self, known: Known) -> None:
        """Raise a UserError if the server has another version of a shard than the index."""
        try:
            if is_same(self.server.stat(known.path), known.stat):
                return
            later = [self.server.stat(known.path) for _ in range(REPEATS)]
        except Unavailable:
            return
        where = f"{self.server.url}/{known.path}"
        if any(is_same(stat, known.stat) for stat in later):
            right = "let all of them state one version, or give the URL of one"
            raise UserError(f"{where}: the server states two versions (ETags) in turns, as replicas do: {right}")
        raise UserError(f"{where}: was replaced after it was indexed: {self.advice}")

    # --- room ---

    def _make_room(self, size: int, is_ahead: bool) -> bool:
        """Remove the shards that were used longest ago until there is room for a size. Return whether there is.

        For a shard that is needed now, all others may go, and the limit is exceeded rather than that it fails.
        """
        if self.gigabytes is None:
            disk = shutil.disk_usage(self.folder)
            excess = LEFT_FREE * disk.total + size - disk.free
        else:
            excess = sum(each for _, _, each in self._cached_files()) + size - self.gigabytes * GIB
        excess = self._remove_oldest(excess, self._state().announced if is_ahead else ())
        return excess <= 0 or not is_ahead

    def _remove_oldest(self, excess: float, kept: Collection[str]) -> float:
        """Remove the shards that were used longest ago, but some. Return how many bytes are still to be removed.

        Args:
            excess: bytes to remove.
            kept: the hashes of shards that stay.
        """
        for _, path, size in sorted(self._cached_files()) if excess > 0 else ():
            if excess <= 0:
                break
            with contextlib.suppress(OSError):
                is_part = path.endswith(".part")
                if path.rpartition("/")[2] in kept or (is_part and time.time() - os.stat(path).st_mtime < ABANDONED):
                    continue
                os.unlink(path)
                excess -= size
        return excess

    def _cached_files(self) -> list[tuple[int, str, int]]:
        """Return the time of the last use, the path and the size of each file of the cache."""
        files = []
        folders = [self.folder]
        while folders:
            with contextlib.suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        if len(entry.name) == 2 and entry.is_dir(follow_symlinks=False):
                            folders.append(Path(entry.path))
                        elif len(entry.name) >= 64 and entry.is_file(follow_symlinks=False):
                            stat = entry.stat(follow_symlinks=False)
                            files.append((stat.st_atime_ns, entry.path, stat.st_size))
        return files
