"""Keep whole shards of a server in a folder of the machine, for all its processes and runs.

A shard is kept under the SHA-256 of its content, which the index has. So runs share what they keep, a shard that was
replaced is another file, and what arrives is checked. A process that fetches a shard holds a lock on a temporary file,
which is renamed at the end; others wait for the lock. It ends with its process.
"""

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from lockstep.arithmetic.streams import ShardNeed
from lockstep.errors import UserError
from lockstep.launch.environment import environment
from lockstep_streams.server import REMEDY, Server, Stat, Unavailable, digest_of, is_same, md5_of
from lockstep_streams.shard_scan import is_packed

FULL = (errno.ENOSPC, errno.EDQUOT)
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of a file system that has no locks
ABANDONED = 86_400  # seconds, after which a temporary file without a lock belongs to no process
REPEATS = 6  # whether the version of a shard changes back
THREADS = 4  # of a process, that fetch ahead
FIRST_AHEAD, MOST_AHEAD = 4, 64  # shards
GIB = 1 << 30
LEFT_FREE = 0.05  # of the disk, without a limit
SPARE = 0.02  # of the cache, that is removed beyond what is needed
ROOM = "room.lock"  # the file with the size of the cache; whoever makes room locks it
COUNT_AGAIN = 600  # seconds, after which the files of the cache are counted again
# The time of change, in ns, of files that were checked and not touched since. It is an even number of
# seconds after 1980, since some file systems keep no other.
WHOLE = 1_000_000_000 * 10**9
NEVER = 1 << 62  # steps until an unlisted shard is needed
LATER = 1 << 40  # steps that are added for a data set that is not being read
PLAN = np.dtype([("key", "<u8"), ("first", "<i8")])  # of a shard: begin of its hash, steps until it is needed
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


@dataclass(frozen=True)
class Table:
    """What the index knows of all shards of a part, as columns that may be mapped into memory."""

    paths: NDArray[np.bytes_]
    sizes: NDArray[np.int64]
    versions: NDArray[np.bytes_]
    cached_bytes: NDArray[np.int64]
    sha256: NDArray[np.bytes_]

    @classmethod
    def of(cls, known: Sequence[Known]) -> "Table":
        """Return the table of some shards."""
        return cls(
            np.array([os.fsencode(each.path) for each in known], np.bytes_),
            np.array([each.stat[0] for each in known], np.int64),
            np.array([each.stat[1].encode() for each in known], np.bytes_),
            np.array([each.cached_bytes for each in known], np.int64),
            np.array([each.sha256.encode() for each in known], np.bytes_),
        )

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __getitem__(self, number: int) -> Known:
        stat = int(self.sizes[number]), self.versions[number].decode()
        return Known(
            os.fsdecode(self.paths[number]), stat, int(self.cached_bytes[number]), self.sha256[number].decode()
        )


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


class Size(NamedTuple):
    """The size of a cache, as its file ROOM states it. Processes that fetch add to it, so few need to count files.

    Attributes:
        total: bytes of all files.
        counted: when the files were counted, in seconds.
    """

    total: int
    counted: int

    @classmethod
    def recorded(cls, file: IO[bytes]) -> "Size | None":
        """Return what a file states; None: nothing, or the files were counted so long ago that it may be wrong.

        Users remove files, and a process may be killed before it makes its note.
        """
        match = re.fullmatch(rb"(\d+) (\d+)\n", file.read(100))
        made = cls(*map(int, match.groups())) if match else cls(0, 0)
        return made if 0 <= time.time() - made.counted < COUNT_AGAIN else None

    def record(self, file: IO[bytes]) -> None:
        """Write it to a file, which all users may write, since each of them has to add to it."""
        if not file.writable():
            return
        with contextlib.suppress(OSError):
            os.fchmod(file.fileno(), 0o666)  # the umask has taken something
        with contextlib.suppress(OSError):
            file.seek(0)
            file.write(f"{max(0, self.total)} {self.counted}\n".encode())
            file.truncate()
            file.flush()


class _OfProcess:
    """What a process has of a cache. A fork makes its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.seen: set[int] = set()  # shards that were read
        self.checked: set[tuple[str, int, int]] = set()  # files that others can write, and that were hashed
        self.futures: dict[int, Future[None]] = {}  # shards that are being fetched
        self.wanted: list[ShardNeed] = []
        self.step = 0
        self.changed = threading.Condition(self.lock)
        self.threads: list[threading.Thread] = []
        self.plan: Any = None  # the open file of this process's list
        self.rows = np.empty(0, PLAN)  # its content


_ACTIVE: dict[str, _OfProcess] = {}  # that of the data set which this process reads


def _write_rows(process: _OfProcess, rows: NDArray[Any]) -> None:
    if process.plan is not None:
        with contextlib.suppress(OSError):
            content = rows.tobytes()
            os.pwrite(process.plan.fileno(), content, 0)
            os.ftruncate(process.plan.fileno(), len(content))


class ShardCache:
    """The kept shards of a server.

    Args:
        server: the server.
        table: what the index knows of its shards.
        folder: the folder of the cache.
        gigabytes: its limit, of all runs that use it; None: a part of the disk stays free.
        pack: writes the images of a packed shard, see `Examine`.
        advice: what to do if a shard was replaced, for messages.
    """

    def __init__(
        self,
        server: Server,
        table: Table | None,
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
        file = self._open_cached(known, is_first)
        if file is None or is_first:
            process.seen.add(number)
            self._activate(process)
        if file is None:
            began = time.monotonic_ns()
            with process.lock:
                future = process.futures.get(number)
            if future is not None:
                future.result()
            while (file := self._open_cached(known)) is None:
                self._fetch(known, None)
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
        return self.table[number]

    def path(self, known: Known) -> Path:
        """Return the file in which a shard is kept."""
        return self.folder / known.sha256[:2] / known.sha256

    def _open_cached(self, known: Known, notes_use: bool = True) -> int | None:
        """Open what is kept of a shard. Remove it if it is damaged. None: it is not there.

        Args:
            notes_use: whether the file gets the time, which tells those that were used long ago.
        """
        path = self.path(known)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(
                f"{path}: can't be read ({error.strerror}): repair it, or use another data.cache"
            ) from error
        stat = os.fstat(file)
        whole = stat.st_size == known.cached_bytes
        # Only a file that nobody else could write tells by its time that it was checked.
        is_private = stat.st_uid == os.geteuid() and not stat.st_mode & 0o022
        key, checked = (known.sha256, stat.st_ino, stat.st_mtime_ns), self._state().checked
        trusted = is_private and stat.st_mtime_ns == WHOLE
        if whole and (trusted or key in checked) and not notes_use:
            return file
        if whole and not trusted and key not in checked:
            with open(file, "rb", closefd=False) as opened:
                whole = digest_of(opened, "sha256") == known.sha256
            if whole and not is_private:
                checked.add(key)
        if not whole:
            os.close(file)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
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
        needed = int(np.sort(self.table.cached_bytes)[-2 * pieces * window :].sum()) / GIB
        if needed <= self.gigabytes:
            return ""
        of = f"the shards that the pieces of a machine ({pieces}) read at a time, and the next ones"
        right = "give as much, or shards are fetched again and again"
        return f"data.cache_gb={self.gigabytes:g}: {of}, take up to {needed:.3g} GB: {right}"

    def will_need(self, step: int, needs: Sequence[ShardNeed]) -> None:
        """Fetch shards in the background, in the order of `needs`; see `lockstep.data.streams.ReadsAhead`."""
        process = self._state()
        self._write_plan(process, step, needs)
        with process.lock:
            process.wanted, process.step = list(needs), step
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
                need = process.wanted.pop(0)
                if need.shard in process.futures:
                    continue
                future = process.futures[need.shard] = Future()
                distance = max(0, need.first_step - process.step)
            try:
                known = self.known(need.shard)
                file = self._open_cached(known)
                if file is None:
                    self._fetch(known, distance)
                else:
                    os.close(file)
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)
            finally:
                with process.lock:
                    del process.futures[need.shard]

    def _write_plan(self, process: _OfProcess, step: int, needs: Sequence[ShardNeed]) -> None:
        """Write this process's list for whoever needs room in the cache. A lock shows that the process exists."""
        if process.plan is None or not os.path.exists(process.plan.name):  # another may have removed it by mistake
            with contextlib.suppress(OSError):  # without it, other shards are removed first
                (self.folder / "plans").mkdir(parents=True, exist_ok=True)
                process.plan = open(self.folder / "plans" / uuid.uuid4().hex, "w+b", buffering=0)  # noqa: SIM115
                fcntl.flock(process.plan, fcntl.LOCK_EX)
        rows = [(int(self.known(each.shard).sha256[:16], 16), each.first_step - step) for each in needs]
        process.rows = np.array(rows, PLAN)
        _write_rows(process, process.rows)
        self._activate(process)

    @staticmethod
    def _activate(process: _OfProcess) -> None:
        """Note that a process reads this data set, and its others later: a process reads one at a time."""
        before = _ACTIVE.get("process")
        if before is process:
            return
        _ACTIVE["process"] = process
        if before is not None and before.pid == process.pid:
            later = before.rows.copy()
            later["first"] += LATER
            _write_rows(before, later)
            _write_rows(process, process.rows)

    # --- fetching ---

    def fetch(self, known: Known) -> Path:
        """Return the file in which something is kept. Fetch it first if it is not there.

        Raises:
            UserError: It can't be fetched.
        """
        while (file := self._open_cached(known)) is None:
            self._fetch(known, None)
        os.close(file)
        return self.path(known)

    def fetch_new(self, path: str, stat: Stat, examine: Examine) -> tuple[Known, Any]:
        """Fetch a shard that is not in the index yet. Return what is known of it then, and what `examine` returns.

        Raises:
            UserError: It can't be fetched, or `examine` refuses it.
        """
        name = hashlib.sha256(f"{self.server.url}/{path}\0{stat}".encode()).hexdigest()
        results: list[Any] = []
        known = self._fetch(Known(path, stat, -1, name), None, lambda *files: results.append(examine(*files)))
        return known, results[0]

    def _fetch(self, known: Known, distance: int | None, examine: Examine | None = None) -> Known:
        """Fetch a shard, unless another process has just done so.

        Args:
            known: of the shard. If it is new, `sha256` is only a name for the temporary file.
            distance: steps until it is needed: shards that are needed sooner are not removed for it. None: it is
                needed now.
            examine: see `Examine`, for a shard that is not in the index.

        Raises:
            UserError: It can't be fetched.
        """
        is_new = examine is not None
        reserved = max(0, known.stat[0]) + (max(0, known.cached_bytes) if is_packed(known.path) else 0)
        if self.gigabytes is not None and reserved > self.gigabytes * GIB:
            where = f"{self.server.url}/{known.path}"
            raise UserError(f"data.cache_gb={self.gigabytes:g}: {where} alone takes {reserved / GIB:.3g} GB: give more")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            single = "" if self._has_locks() else f"-{uuid.uuid4().hex}"  # else two processes would write one file
            part = self.folder / f"{'new-' if is_new else ''}{known.sha256}{single}.{reserved}.part"
            with locked(part, 0o644) as file:
                if not is_new and (cached := self._open_cached(known)) is not None:  # another process has fetched it
                    os.close(cached)
                    part.unlink(missing_ok=True)
                    return known
                if not self._make_room(part, distance):
                    part.unlink(missing_ok=True)
                    return known  # it is fetched when it is needed
                return self._complete(known, part, file, examine)
        except OSError as error:
            if error.errno in FULL:
                remedy = "free space, or give another data.cache or a smaller data.cache_gb"
                raise UserError(f"{self.folder}: no space for {known.path}: {remedy}") from error
            reason = error.strerror or error
            raise UserError(f"{self.folder}: can't be written ({reason}): give another data.cache=<folder>") from error

    def _has_locks(self) -> bool:
        """Check whether the file system of the cache has locks."""
        with open(os.open(self.folder / ROOM, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "rb") as file:
            return has_locks(file)

    def _complete(self, known: Known, part: Path, file: IO[bytes], examine: Examine | None) -> Known:
        """Download a shard to its temporary file, check it, and give it its name."""
        where = f"{self.server.url}/{known.path}"
        is_new, packed = examine is not None, is_packed(known.path)
        if packed and examine is None:
            examine = self.pack
        digests: list[str] = []
        for is_last in (False, True):
            start = file.seek(0, os.SEEK_END)
            if not 0 < start <= known.stat[0] or (is_new and not known.stat[1]):  # half of an unknown version
                start = 0
                file.truncate(0)
            file.seek(start)
            try:
                self.server.read(known.path, known.stat[0], lambda content: self._write(file, content), start)
            except Unavailable as error:
                self._refuse_replaced(known)
                raise UserError(f"{where}: {error}: {REMEDY}") from error
            self.counters.add("bytes", file.tell() - start)
            with (
                open(part.with_suffix(".packed"), "w+b", opener=_open_private)
                if packed
                else contextlib.nullcontext(file) as target
            ):
                made = Path(target.name) if packed else part
                try:
                    if examine is not None:
                        examine(where, part, target)
                    target.flush()
                    sha256 = digest_of(target, "sha256")
                    if is_new and not self._is_what_was_sent(known, file, digests):
                        file.truncate(0)
                        continue
                    if not is_new and sha256 == known.sha256 and target.seek(0, os.SEEK_END) != known.cached_bytes:
                        wrong = f"{where}: has {target.tell():,} bytes, and the index states {known.cached_bytes:,}"
                        raise UserError(f"{wrong}: {self.advice}")
                    if is_new or sha256 == known.sha256:
                        stat = file.seek(0, os.SEEK_END), known.stat[1]
                        known = known._replace(sha256=sha256, cached_bytes=target.seek(0, os.SEEK_END), stat=stat)
                        self.path(known).parent.mkdir(exist_ok=True)
                        os.fchmod(target.fileno(), os.fstat(target.fileno()).st_mode & 0o644)
                        os.fsync(target.fileno())
                        os.utime(target.fileno(), ns=(time.time_ns(), WHOLE))
                        os.rename(made, self.path(known))
                        self.counters.add("fetched")
                        if packed:
                            part.unlink(missing_ok=True)
                        self._note_change(known.cached_bytes - reserved_by(str(part)))
                        return known
                except UserError:
                    if is_new or is_last:
                        part.unlink(missing_ok=True)
                        raise
                finally:
                    if packed:
                        made.unlink(missing_ok=True)
            self._refuse_replaced(known)
            file.truncate(0)
            if not is_last:
                self.counters.add("retries")
        part.unlink(missing_ok=True)
        if is_new:
            raise UserError(
                f"{where}: has arrived twice, with different bytes and another MD5 than the server states: {REMEDY}"
            )
        raise UserError(f"{where}: has arrived twice with another SHA-256 than that in the index: {self.advice}")

    def _is_what_was_sent(self, known: Known, file: IO[bytes], digests: list[str]) -> bool:
        """Check a new shard by the MD5 that most servers state. Refuse one that was replaced meanwhile.

        If the same bytes arrive twice, it is none: the ETag of an encrypted shard only looks like one.

        Args:
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

    def _write(self, file: IO[bytes], content: bytes) -> None:
        """Write to a file; if the disk is full, remove shards that nobody needs, and try again."""
        # Not by the file's buffer, which after an error still has the content, and would write it twice.
        start, done, view = file.tell(), 0, memoryview(content)
        for last in (False, True):
            try:
                while done < len(content):
                    done += os.pwrite(file.fileno(), view[done:], start + done)
                file.seek(start + done)
                return
            except OSError as error:
                if error.errno not in FULL or last or not self._remove_unneeded(len(content) + GIB):
                    raise

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

    def _cached_files(self) -> list[tuple[str, int, int]]:
        """Return path, size and time of the last use of each file of the cache.

        The size of a temporary file is what it will have at its end.
        """
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
                            size = max(stat.st_size, reserved_by(entry.path))
                            files.append((entry.path, size, stat.st_atime_ns))
        return files

    def _make_room(self, part: Path, distance: int | None) -> bool:
        """Remove shards until the cache is within its limit. Return False if it can't be without needed ones.

        Shards that no process lists go first, those used longest ago before others; then those that are needed last.
        The files are counted only if there is no room. Of those that no process lists a few more are removed then, so
        that the next fetches find room.

        Args:
            part: the temporary file of the shard that is to be fetched.
            distance: see `_fetch`.
        """
        reserved = reserved_by(str(part))
        with locked(self.folder / ROOM) as file:
            before = Size.recorded(file)
            size = None if before is None else before._replace(total=before.total + reserved)
            excess = self._excess(size, reserved)
            if excess is not None and excess <= 0:
                if size is not None:
                    size.record(file)
                return True
            files = self._in_order_of_removal()
            size = Size(sum(each for _, each, _ in files), int(time.time()))
            excess = self._excess(size, reserved) or 0.0
            total = size.total
            spare = SPARE * total if excess > 0 else 0.0
            for path, its_size, uses in files:
                if excess <= (-spare if uses == NEVER else 0) or (distance is not None and uses <= distance):
                    break
                if path != str(part) and removed(path):
                    excess, total = excess - its_size, total - its_size
            has_room = excess <= 0 or distance is None
            size._replace(total=total if has_room else total - reserved).record(file)
            return has_room

    def _note_change(self, change: int) -> None:
        """Add to the size of the cache that is recorded, if one is."""
        if change:
            with locked(self.folder / ROOM) as file:
                if (size := Size.recorded(file)) is not None:
                    size._replace(total=size.total + change).record(file)

    def _excess(self, size: Size | None, reserved: int) -> float | None:
        """Return by how many bytes the cache is above its limit; None: unknown.

        Args:
            size: of the cache, with the shard that is to be fetched; None: unknown.
            reserved: for that shard, which is not on the disk yet.
        """
        if self.gigabytes is not None:
            return None if size is None else size.total - self.gigabytes * GIB
        disk = shutil.disk_usage(self.folder)  # as long as it is not full, the files need not be counted
        return LEFT_FREE * disk.total + reserved - disk.free

    def _remove_unneeded(self, size: int) -> bool:
        """Remove shards that no process lists, up to a size. Return whether there was one."""
        is_freed = False
        with locked(self.folder / ROOM):
            for path, its_size, uses in self._in_order_of_removal():
                if size <= 0 or uses != NEVER:
                    break
                if removed(path):
                    is_freed, size = True, size - its_size
        return is_freed

    def _in_order_of_removal(self) -> list[tuple[str, int, int]]:
        """Return path, size and steps until the next use of each file, the first to be removed first."""
        uses = self._next_uses()
        rows = []
        for path, size, used in self._cached_files():
            name = path.rpartition("/")[2].removeprefix("new-")
            rows.append((uses.get(int(name[:16], 16), NEVER), -used, path, size))
        return [(path, size, distance) for distance, _, path, size in sorted(rows, reverse=True)]

    def _next_uses(self) -> dict[int, int]:
        """Return the steps until each listed shard is needed, by the begin of its hash, over all processes."""
        uses: dict[int, int] = {}
        this_plan = Path(self._process.plan.name).name if self._process.plan else ""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder / "plans") as entries:
            for entry in entries:
                with contextlib.suppress(OSError), open(entry.path, "rb") as file:
                    if entry.name != this_plan and is_free(entry.path):
                        os.unlink(entry.path)
                        continue
                    content = file.read()
                    rows = np.frombuffer(content[: len(content) // PLAN.itemsize * PLAN.itemsize], PLAN)
                    for key, first in zip(rows["key"].tolist(), rows["first"].tolist(), strict=True):
                        uses[key] = min(uses.get(key, NEVER), max(0, first))
        return uses


def reserved_by(path: str) -> int:
    """Return the bytes that a temporary file will take, which are in its name."""
    parts = path.rpartition("/")[2].split(".")
    return int(parts[1]) if len(parts) == 3 and parts[1].isdigit() else 0


def is_free(path: str) -> bool:
    """Check whether no process has locked a file.

    It is opened for writing, which NFS needs for an exclusive lock; another user's may be readable only.
    """
    try:
        number = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with open(number, "rb") as file:
        return is_free_to_lock(file)


def is_free_to_lock(file: IO[bytes]) -> bool:
    """Lock a file, if no process has locked it. Without locks, a file that is old enough belongs to none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in NO_LOCKS and time.time() - os.fstat(file.fileno()).st_mtime > ABANDONED
    return True


def has_locks(file: IO[bytes]) -> bool:
    """Check whether the file system of a file has locks. A lock that another process has shows it, too."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
    except OSError as error:
        return error.errno not in NO_LOCKS
    return True


def removed(path: str) -> bool:
    """Remove a file of the cache, unless it is a temporary one of a process that exists. Return whether it is gone."""
    try:
        if path.endswith((".part", ".packed")):
            locked_file = path.removesuffix(".packed").removesuffix(".part") + ".part"
            with contextlib.suppress(FileNotFoundError), open(locked_file, "r+b") as file:
                if not is_free_to_lock(file):
                    return False
                os.unlink(locked_file)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _open_private(path: str, flags: int) -> int:
    """Open a file that others can't write; an `opener` of `open`."""
    return os.open(path, flags, 0o644)


@contextlib.contextmanager
def locked(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a file for reading and writing, and lock it until the end of the block. Wait if another process has it.

    Args:
        mode: of a new file, without what the umask takes. If others may not write it, one that another user has left
            is removed.
    """
    while True:
        flags, is_writable = os.O_NOFOLLOW | os.O_CLOEXEC, True
        # first without O_CREAT: in a folder as /tmp, Linux refuses it for a file of another user
        for creates in (0, os.O_CREAT, 0):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                number = os.open(path, os.O_RDWR | flags | creates, mode)
                break
        else:
            number, is_writable = os.open(path, os.O_RDONLY | flags), False
        with os.fdopen(number, "r+b" if is_writable else "rb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
            except FileNotFoundError:
                same = False
            if same and not is_writable and not mode & 0o022:
                path.unlink()
                continue
            if same:  # else it was renamed or removed while this process waited
                try:
                    yield file
                finally:  # not by closing alone: a process that was forked meanwhile has the file open, too
                    with contextlib.suppress(OSError):
                        fcntl.flock(file, fcntl.LOCK_UN)
                return
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
