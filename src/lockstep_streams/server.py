"""Read the objects of an object store or a web server, by fsspec's file systems.

fsspec keeps threads, and its file systems can't be used after a fork. So a `Server` makes a file system in each process
that reads, when it first reads.
"""

import base64
import contextlib
import hashlib
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, TypeVar

from lockstep.errors import UserError
from lockstep.text import plural

LOG = logging.getLogger("lockstep")
DRIVERS = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "hf": "huggingface_hub",
    "abfs": "adlfs",
    "az": "adlfs",
    "abfss": "adlfs",
}  # Python packages
NO_LISTING = ("http", "https")  # a page with links is no list of files
CHUNK = 8 << 20  # bytes of a request
CHUNK_SECONDS, LISTING_SECONDS = 60.0, 1800.0  # timeouts of a request, and of a listing
FIRST_WAIT, LONGEST_WAIT = 0.2, 20.0  # seconds before another try
PERMANENT_TRIES = 3  # of an object that is missing or forbidden
# What a server says of an object's version, in order of preference.
VERSIONS = (
    *("ETag", "etag", "Content-MD5", "Digest", "blob_id", "LastModified", "last_modified", "updated"),
    *("Last-Modified", "mtime", "created"),
)
Result = TypeVar("Result")
Stat = tuple[int, str]  # size in bytes and version, see `stat_of`
UNKNOWN: Stat = (-1, "")


class Unavailable(Exception):
    """An object could not be read. The message is the reason."""


@dataclass(eq=False)
class Server:
    """The objects below a URL.

    Attributes:
        url: the URL, without a slash at its end.
        retry_seconds: how long a request is tried again.
        on_retry: is called before each further try.
    """

    url: str
    retry_seconds: float = 240.0
    on_retry: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._opened: tuple[int, Any, str] | None = None  # process, file system, root
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "retry_seconds": self.retry_seconds, "_opened": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def lists(self) -> bool:
        """Whether the server lists its objects."""
        return self.url.partition(":")[0] not in NO_LISTING

    def files(self) -> dict[str, Stat]:
        """Return the objects below the URL by their paths.

        Raises:
            UserError: They can't be listed.
        """

        def find() -> dict[str, Any]:
            fs, root = self._fs()
            fs.invalidate_cache()
            objects: dict[str, Any] = called(fs, "find", root, timeout=LISTING_SECONDS, detail=True)
            return {name: info for name, info in objects.items() if info.get("type", "file") == "file"}

        root = self._fs()[1].rstrip("/") + "/"
        try:
            objects = self._tried(find, self.url)
        except Unavailable as error:
            remedy = REMEDY
            if error.__cause__ is not None and status_of(error.__cause__) in (401, 403):
                remedy = f"if its objects may be read, a pattern names them: {self.url}/train-{{000..099}}.tar"
            raise UserError(f"{self.url}: the list of its objects: {error}: {remedy}") from error
        return {name.removeprefix(root): stat_of(info) for name, info in objects.items() if name.startswith(root)}

    def stat(self, path: str) -> Stat:
        """Return the size and version of an object; raise `Unavailable`."""

        def info() -> Any:
            fs, root = self._fs()
            fs.invalidate_cache()
            return called(fs, "info", f"{root}/{path}" if path else root)

        try:
            return stat_of(self._tried(info, path))
        except Unavailable as error:
            raise Unavailable(f"a request for its size (HEAD): {error}") from error.__cause__

    def read(self, path: str, size: int, write: Callable[[bytes], Any], start: int = 0) -> None:
        """Read an object from `start` on, and pass its bytes to `write` in order.

        Args:
            path: below the URL.
            size: of the whole object in bytes; -1: unknown, and it is read by one request.
            write: is called with the bytes of each request.
            start: the first byte.

        Raises:
            Unavailable: It can't be read, or is smaller.
        """
        step = CHUNK if size >= 0 else 0
        while start < size or step == 0:
            stop = min(start + step, size) if step else None
            content = self._tried(partial(self._range, path, start, stop), path)
            if stop is not None and len(content) == size > stop - start:  # the server knows no ranges
                content, stop = content[start:], size
            if stop is not None and len(content) != stop - start:
                raise Unavailable(f"it has {start + len(content):,} bytes and not {size:,}")
            write(content)
            if stop is None:
                return
            start = stop

    def read_small(self, path: str) -> bytes | None:
        """Return an object's content; None if there is none; raise `Unavailable`."""
        try:
            content: bytes = self._tried(lambda: self._range(path, 0, None), path, may_be_missing=True)
        except Unavailable as error:
            if error.__cause__ is not None and is_permanent(error.__cause__):
                return None
            raise
        return content

    def tried(self, call: Callable[[], Result], what: str) -> Result:
        """Return what a call returns; raise a UserError about `what` if it fails again and again."""
        try:
            return self._tried(call, what)
        except Unavailable as error:
            raise UserError(f"{what}: {error}: {REMEDY}") from error

    def _tried(self, call: Callable[[], Result], what: str, may_be_missing: bool = False) -> Result:
        """Call a function again after an error, with growing waits, until it succeeds or `retry_seconds` are over.

        Args:
            may_be_missing: whether an object that is missing is no error of the server. Without a right to list, S3
                answers 403 for it.
        """
        began, tries = time.monotonic(), 0
        while True:
            try:
                return call()
            except (UserError, Unavailable, MemoryError, NotImplementedError):
                raise
            except Exception as error:  # fsspec's drivers raise errors of their own libraries
                tries += 1
                if may_be_missing and is_permanent(error):
                    raise Unavailable(reason(error)) from error
                waited = time.monotonic() - began
                pause = min(LONGEST_WAIT, FIRST_WAIT * 2**tries) * random.uniform(0.5, 1.0)
                pause = max(pause, retry_after(error))
                over = waited + pause > self.retry_seconds or (tries >= PERMANENT_TRIES and is_permanent(error))
                if over:
                    raise Unavailable(f"{reason(error)} ({plural(tries, 'try').replace('trys', 'tries')})") from error
                if tries == 1:
                    where = what if self.url in what else f"{self.url}/{what}"
                    LOG.warning("%s: %s: it is tried again for %.0f s", where, reason(error), self.retry_seconds)
                self.on_retry()
                time.sleep(pause)

    def _range(self, path: str, start: int, stop: int | None) -> bytes:
        fs, root = self._fs()
        name = f"{root}/{path}" if path else root
        limits = {} if stop is None and not start else {"start": start, "end": stop}
        return bytes(called(fs, "cat_file", name, **limits))

    def _fs(self) -> tuple[Any, str]:
        """Return this process's file system, and the root in its own words.

        Raises:
            UserError: There is no such protocol, or its driver is missing.
        """
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = (os.getpid(), *open_file_system(self.url))
            return self._opened[1:]

    def after_fork(self) -> None:
        """Forget the lock, which another thread of the parent may have held."""
        self._lock = threading.Lock()


REMEDY = "start the run again when the server answers, and it goes on from its checkpoint"


def open_file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the URL's root in its own words.

    Raises:
        UserError: There is no such protocol, its driver is missing, or what it needs is neither in the URL nor in the
            environment.
    """
    import fsspec

    protocol = url.partition(":")[0]
    try:
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError as error:
            known = ", ".join(sorted(DRIVERS))
            raise UserError(f"{url}: there is no protocol {protocol}: known are {known}") from error
        # its own one: fsspec would return one that was made with other credentials, or before them
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    except ImportError as error:
        package = DRIVERS.get(protocol, error.name or protocol)
        raise UserError(f"{url}: {protocol}:// needs {package}: pip install {package}") from error
    except ValueError as error:  # so Azure's driver says that there is no account
        right = "correct the URL, or set what the driver needs in the environment (lockstep docs shards)"
        raise UserError(f"{url}: {protocol}:// can't be opened: {one_line(error)}: {right}") from error
    return fs, str(root).rstrip("/")


def called(fs: Any, method: str, *arguments: Any, timeout: float | None = None, **options: Any) -> Any:
    """Call a method of a file system, with a timeout if it can have one."""
    if not getattr(fs, "async_impl", False):
        return getattr(fs, method)(*arguments, **options)
    from fsspec.asyn import sync

    return sync(fs.loop, getattr(fs, f"_{method}"), *arguments, timeout=timeout or CHUNK_SECONDS, **options)


def stat_of(info: Any) -> Stat:
    """Return the size and version in fsspec's description of an object.

    The version is the ETag, or else another text or time that changes with the object. On S3 the ETag is mostly the MD5
    in hex. Where GCS and Azure state the MD5 beside an ETag that is something else, it is a line before it.
    """
    size, version = info.get("size"), next((info[key] for key in VERSIONS if info.get(key)), "")
    if isinstance(version, datetime):  # a driver may list times as numbers
        version = (version if version.tzinfo else version.replace(tzinfo=UTC)).timestamp()
    if isinstance(version, int):
        version = float(version)
    lines = (md5_beside(info), str(version).strip('"'))
    return (-1 if size is None else int(size)), "\n".join(filter(None, lines))


def md5_of(version: str) -> str | None:
    """Return the MD5 that a version seems to state, in hex."""
    first = version.partition("\n")[0]
    return first if re.fullmatch("[0-9a-f]{32}", first) else None


def digest_of(file: Any, kind: str) -> str:
    """Return a hash of an open file, in hex."""
    file.seek(0)
    return hashlib.file_digest(file, partial(hashlib.new, kind, usedforsecurity=False)).hexdigest()


def is_same(one: Stat, other: Stat) -> bool:
    """Check whether two objects are the same, as far as it is known: one line of their versions is enough."""
    (size, version), (other_size, other_version) = one, other
    if min(size, other_size) >= 0 and size != other_size:
        return False
    return not version or not other_version or not set(version.split("\n")).isdisjoint(other_version.split("\n"))


def md5_beside(info: Any) -> str:
    """Return the MD5 in hex that GCS (in base64) or Azure (as bytes) states; an empty text if there is none."""
    value = info.get("md5Hash") or (info.get("content_settings") or {}).get("content_md5")
    with contextlib.suppress(TypeError, ValueError):
        md5 = base64.b64decode(value, validate=True) if isinstance(value, str) else bytes(value or b"")
        return md5.hex() if len(md5) == 16 else ""
    return ""


def causes(error: BaseException) -> list[BaseException]:
    """Return an error and those that it was raised from."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < 9:
        chain.append(before)
    return chain


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error, if it has one."""
    for each in causes(error):
        response = getattr(each, "response", None)
        meta = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        stated = getattr(each, "status", None)
        for status in (
            stated if isinstance(stated, int) else getattr(each, "code", None),  # gcsfs calls it so
            getattr(response, "status_code", None),
            meta.get("HTTPStatusCode"),
        ):
            if isinstance(status, int) and status >= 400:
                return status
        if isinstance(each, OSError) and str(each).startswith("Forbidden: "):  # so gcsfs says 403
            return 403
    return None


def retry_after(error: BaseException) -> float:
    """Return the seconds that a server asks to wait before another try; 0 if it asks for nothing."""
    for each in causes(error):
        response = getattr(each, "response", None)
        of_s3 = response.get("ResponseMetadata", {}).get("HTTPHeaders") if isinstance(response, dict) else None
        for headers in (getattr(each, "headers", None), getattr(response, "headers", None), of_s3):
            stated = {str(name).lower(): value for name, value in dict(headers or {}).items()}.get("retry-after")
            with contextlib.suppress(TypeError, ValueError):
                if stated is not None and str(stated).strip().isdigit():
                    return float(stated)
                if stated is not None:  # a date
                    return max(0.0, (parsedate_to_datetime(str(stated)) - datetime.now(UTC)).total_seconds())
    return 0.0


def refused(error: BaseException) -> bool:
    """Check whether an error is another one than that there is no object. fsspec's HTTP raises that for all."""
    status = status_of(error)
    if status is not None:
        return status != 404
    return any(isinstance(each, OSError) and not isinstance(each, FileNotFoundError) for each in causes(error))


def is_permanent(error: BaseException) -> bool:
    """Check whether trying again for long would be useless."""
    status = status_of(error)
    if status is not None:
        return status in (400, 401, 403, 404, 405, 410, 416, 501)
    kinds = (FileNotFoundError, PermissionError, IsADirectoryError)
    return (isinstance(error, kinds) and not refused(error)) or isinstance(error, PermissionError)


def reason(error: BaseException) -> str:
    """Return why a request failed: the status, and the driver's words."""
    status = status_of(error)
    if status in (404, 410) or (status is None and isinstance(error, FileNotFoundError) and not refused(error)):
        return "there is no such object"
    last = next((each for each in causes(error) if isinstance(each, OSError) and each.strerror), None)
    words = (last.strerror if last is not None else None) or one_line(error)
    words = re.sub(r"\?\S*", "", words)  # the query of a URL may have a signature
    if status in (401, 403) or isinstance(error, PermissionError):
        return f"access is denied ({status or 403}), with the credentials of the environment: {words}"[:160]
    if status is not None:
        return f"the server answers with status {status}: {words}"[:160]
    if any("Timeout" in type(each).__name__ for each in causes(error)):
        return f"the server does not answer within {CHUNK_SECONDS:.0f} s"
    if any(type(each).__name__ == "NoCredentialsError" for each in causes(error)):
        return "there are no credentials in the environment; a public bucket needs FSSPEC_S3_ANON=true there"
    return f"{type(error).__name__}: {words}"[:160]


def one_line(error: BaseException) -> str:
    """Return an error's message in one line."""
    return re.sub(r"\s+", " ", str(error)).strip()
