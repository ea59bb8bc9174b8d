"""Shards on a server: any driver of fsspec, one result, a cache that is checked, and faults that end in one line."""

import errno
import fcntl
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import composed
from small_data import config, refusal_of
from store_servers import WebServer, client, files_in, upload
from written_shards import flip, opened, same, samples, write_folder, write_shards, write_tar

from lockstep.arithmetic.layout import resolve
from lockstep.arithmetic.streams import ShardNeed
from lockstep.config.check import check
from lockstep.config.value_checks import place as checked_place
from lockstep.data.build import open_data
from lockstep.data.datasets import innermost_dataset
from lockstep.data.splits import is_other_data
from lockstep.data.streams import room_note
from lockstep.errors import UserError
from lockstep.files import locked
from lockstep.report import provenance
from lockstep_streams import server as servers
from lockstep_streams import shard_cache
from lockstep_streams.remote import Remote, expanded

pytestmark = pytest.mark.usefixtures("servers")
fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp", reason="the driver of http")
NAMES = "/{train,test}-{00000..00002}.tar"
EACH: dict[str, Any] = {"val_fraction": 0, "test_fraction": 0}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    return write_shards(write_folder(root / "folder"), root / "tar", "tar")


@pytest.fixture
def web(shards: Path, tmp_path: Path) -> Iterator[WebServer]:
    """Return a server of a copy of the shards, whose files a test may change."""
    server = WebServer(Path(shutil.copytree(shards, tmp_path / "web", ignore=shutil.ignore_patterns(".index"))))
    yield server
    server.stop()


def cache_of(part: Any) -> Any:
    return innermost_dataset(part).cache


def cached(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if len(path.name) == 64]


def forget(tmp_path: Path) -> None:
    """Remove the kept shards, and leave the index."""
    shutil.rmtree(tmp_path / "cache" / "lockstep" / "shards")


# --- one result ---


def test_a_bucket_has_the_images_of_the_folder(shards: Path, s3: dict[str, str]) -> None:
    remote, local = opened(upload(shards, s3, "same")), opened(shards)
    for part in ("train", "val", "test"):
        assert same(getattr(remote, part), getattr(local, part))
    assert remote.fingerprint == local.fingerprint
    assert "6 files in s3://images/same, kept in " in remote.about
    client(s3).put_object(Bucket="images", Key="same/old.tar.bak", Body=b"x")
    assert "passed over 1 file (1 .bak): known are .tar" in opened("s3://images/same").about
    other = opened(upload(write_shards(shards.parent / "folder", shards.parent / "cut", "tar", 2, 5), s3, "cut"))
    assert other.fingerprint == local.fingerprint
    assert not same(opened(shards, split_seed=1).val, remote.val)  # the comparison sees a difference


def test_a_web_server_that_lists_nothing_gets_a_pattern(shards: Path, web: WebServer) -> None:
    remote, local = opened(web.url + NAMES), opened(shards)
    assert same(remote.train, local.train)
    assert remote.fingerprint == local.fingerprint
    assert "give a pattern, such as http" in refusal_of(opened, web.url)


def test_parts_and_windows(shards: Path, web: WebServer) -> None:
    remote, local = (opened(place, window=2, **EACH) for place in (web.url + NAMES, shards))
    assert same(remote.train, local.train)
    assert remote.shard_borders.tolist() == local.shard_borders.tolist()


# --- the cache ---


def test_a_shard_is_fetched_once_for_an_index_and_the_images(web: WebServer) -> None:
    data = opened(web.url + NAMES, **EACH)
    samples(data.train)
    size = {name: (web.folder / name).stat().st_size for name in files_in(web.folder)}
    assert {name: web.sent[name] for name in size} == size
    samples(opened(web.url + NAMES, **EACH).train)  # with the index and the shards of the first
    assert {name: web.sent[name] for name in size} == size


@pytest.mark.parametrize("damage", ["flipped", "truncated", "removed"])
def test_a_damaged_shard_of_the_cache_is_fetched_again(web: WebServer, tmp_path: Path, damage: str) -> None:
    expected = samples(opened(web.url + NAMES, **EACH).train)
    for path in cached(tmp_path):
        content = bytearray(path.read_bytes())
        content[700] ^= 1
        path.write_bytes(content if damage == "flipped" else content[:-9])
        if damage == "removed":
            path.unlink()
    data = opened(web.url + NAMES, **EACH).train
    actual = samples(data)
    assert same(actual, expected)
    assert cache_of(data).counters.of_rank()["fetched"] == 3


def test_what_arrives_damaged_is_fetched_again(web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = opened(web.url + NAMES, **EACH).train
    expected = samples(data)
    forget(tmp_path)
    read = servers.Server._range
    damaged: list[str] = []

    def once_damaged(self: Any, path: str, start: int, stop: int | None) -> bytes:
        content = bytearray(read(self, path, start, stop))
        if path not in damaged:
            damaged.append(path)
            content[900] ^= 1
        return bytes(content)

    monkeypatch.setattr(servers.Server, "_range", once_damaged)
    actual = samples(opened(web.url + NAMES, **EACH).train)
    assert len(damaged) >= 3
    assert same(actual, expected)


def test_a_cut_connection_goes_on_where_it_was_cut(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "CHUNK", 4096)
    data = opened(web.url + NAMES, **EACH).train
    expected = samples(data)
    forget(tmp_path)
    faults = iter(["cut", None, 503, None, None, "cut"])
    web.sent.clear()
    web.fault = lambda path: next(faults, None)
    again = opened(web.url + NAMES, **EACH).train
    actual = samples(again)
    assert same(actual, expected)
    assert cache_of(again).counters.of_rank()["retries"] >= 2
    whole = sum((web.folder / name).stat().st_size for name in files_in(web.folder) if "train" in name)
    assert whole <= sum(web.sent.values()) <= whole + 2 * 4096


def test_a_server_without_ranges_is_read_all_the_same(
    shards: Path, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "CHUNK", 4096)
    web.ranges = False
    assert same(opened(web.url + NAMES).train, opened(shards).train)


def test_an_index_with_a_wrong_size_ends_in_a_line(web: WebServer, tmp_path: Path) -> None:
    part = opened(web.url + NAMES, **EACH).train
    cache = cache_of(part)
    cache.table = np.array(cache.table)
    size = int(cache.table["cached_bytes"][0])
    cache.table["cached_bytes"][0] += 5
    line = refusal_of(cache.read, 0, 0, 9)
    assert f"{web.url}/train-00000.tar: has {size:,} bytes, and the index states {size + 5:,}: make " in line
    assert not [*cache.folder.rglob("*.part")]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of what is hashed from now on."""
    kinds: list[str] = []
    digest = shard_cache.digest_of

    def counted(file: Any, kind: str) -> str:
        kinds.append(kind)
        return digest(file, kind)

    monkeypatch.setattr(shard_cache, "digest_of", counted)
    return kinds


@pytest.mark.parametrize("resolution", [1, 100, 10**9, 2 * 10**9])
def test_a_checked_shard_is_hashed_once_on_a_disk_with_coarse_times(
    web: WebServer, hashed: list[str], monkeypatch: pytest.MonkeyPatch, resolution: int
) -> None:
    """Some file systems keep times in steps of 100 ns, or of one or two seconds."""
    utime = os.utime
    monkeypatch.setattr(
        os,
        "utime",
        lambda path, ns, **options: utime(path, ns=tuple(time // resolution * resolution for time in ns), **options),
    )
    part = opened(web.url + NAMES, **EACH).train
    hashed.clear()
    samples(part)
    assert not hashed


@pytest.mark.parametrize("of", ["mode", "owner"])
def test_a_shard_that_others_can_write_is_hashed_once(
    web: WebServer, hashed: list[str], monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    part = opened(web.url + NAMES, **EACH).train
    expected = samples(part)
    cache = cache_of(part)
    path = cache.path(cache.known(0))
    assert path.stat().st_mode & 0o777 == 0o644
    flip_at = part.places[1]["start"] + 60
    content = bytearray(path.read_bytes())
    content[flip_at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(0, shard_cache.WHOLE))
    assert cache._open_cached(cache.known(0)) is not None  # the control: an own file is trusted
    if of == "mode":
        path.chmod(0o664)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1 if path.exists() else 1)
    again = opened(web.url + NAMES, **EACH).train
    actual = samples(again)
    assert same(actual, expected)
    if of == "mode":
        path.chmod(0o664)
    hashed.clear()
    for _ in range(3):
        cache.read(0, 0, 9)
    assert len(hashed) <= 1


def test_a_new_shard_that_arrives_damaged_twice_is_refused(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two times the same bytes with another MD5 are right: their ETag is no MD5."""
    read = servers.Server._range
    places = iter(range(700, 100_000))

    def damaged(self: Any, path: str, start: int, stop: int | None) -> bytes:
        content = bytearray(read(self, path, start, stop))
        if path == "train-00001.tar":
            content[next(places)] ^= 1
        return bytes(content)

    with monkeypatch.context() as patch:
        patch.setattr(servers.Server, "_range", damaged)
        line = refusal_of(opened, web.url + NAMES, **EACH)
    assert (
        "/train-00001.tar: has arrived twice, with different bytes and another MD5 than the server states: start "
        in line
    )
    places = iter([700] * 9)
    with monkeypatch.context() as patch:
        patch.setattr(servers.Server, "_range", damaged)
        opened(web.url + NAMES, **EACH)


@pytest.mark.parametrize("age", [60, 2 * shard_cache.ABANDONED])
def test_half_a_shard_of_a_killed_process_goes_when_room_is_needed(web: WebServer, age: int) -> None:
    """One that a process may still write stays."""
    cache = cache_of(opened(web.url + NAMES, **EACH).train)
    known = cache.known(0)
    half = cache.folder / f"{known.sha256}-of_another.part"
    half.write_bytes(cache.path(known).read_bytes()[:5000])
    os.utime(half, (time.time() - age,) * 2)
    cache.path(known).unlink()
    cache.gigabytes = known.cached_bytes / shard_cache.GIB
    assert cache.read(0, 257, 5) == b"ustar"
    assert half.exists() == (age == 60)


def test_a_limit_removes_what_was_used_longest_ago(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    part = opened(web.url + NAMES, **EACH, window=1).train
    cache = cache_of(part)
    monkeypatch.setattr(shard_cache, "NOTED_EVERY", 0)

    def kept() -> list[bool]:
        return [cache.path(cache.known(number)).exists() for number in range(3)]

    for number in (2, 0, 1):
        cache.read(number, 0, 9)
    cache.path(cache.known(1)).unlink()
    cache.gigabytes = (int(cache.table["cached_bytes"].sum()) - 100) / shard_cache.GIB
    cache.read(1, 0, 9)
    assert kept() == [True, True, False]
    cache.read(0, 0, 9)
    cache.read(2, 0, 9)
    assert kept() == [True, False, True]


def test_what_is_needed_sooner_is_not_removed_for_what_is_fetched_ahead(web: WebServer, tmp_path: Path) -> None:
    cache = cache_of(opened(web.url + NAMES, **EACH, window=1).train)
    forget(tmp_path)
    cache.gigabytes = (int(cache.table["cached_bytes"].sum()) - 100) / shard_cache.GIB

    def announced(*shards: int) -> set[int]:
        cache.will_need(0, [ShardNeed(shard, first, first + 5) for first, shard in enumerate(shards)])
        wait_until(lambda: not cache._process.wanted and not cache._process.futures)
        return {number for number in range(3) if cache.path(cache.known(number)).exists()}

    assert len(announced(0, 1, 2)) == 2  # the third waits until it is needed
    assert announced(2, 1) == {1, 2}  # the control: no process has announced the other one
    assert announced(2, 1) == {1, 2}  # as each step does: what a thread has just fetched was used last until then
    cache.read(0, 0, 9)
    assert cache.path(cache.known(2)).exists()  # it is needed first


def test_a_shard_about_to_get_its_name_is_not_removed_as_an_abandoned_one(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(opened(web.url + NAMES, **EACH, window=1).train)
    forget(tmp_path)
    rename = os.rename

    def make_room() -> None:
        with locked(cache.folder / "room.lock"):
            cache._remove_oldest(1, ())

    def rename_later(*paths: Any) -> None:
        other = threading.Thread(target=make_room, daemon=True)
        other.start()
        other.join(0.3)  # as long as the room's lock is held, it waits
        rename(*paths)

    monkeypatch.setattr(shard_cache.os, "rename", rename_later)
    cache._fetch(cache.known(0))


def test_a_cache_below_what_the_pieces_of_a_machine_read_is_named_with_the_right_size(web: WebServer) -> None:
    opened(web.url + NAMES, **EACH)
    sizes = sorted((web.folder / f"train-{number:05}.tar").stat().st_size / shard_cache.GIB for number in range(3))

    def note(limit: float | None, pieces: int = 2, window: int | None = 1, **on: Any) -> str:
        data = opened(web.url + NAMES, **EACH, cache_gb=limit, window=window)
        options = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "ddp", **on}
        return room_note(data, resolve(batch_size=12, pieces=pieces, **options))

    assert note(1.5 * sizes[-1], pieces=1) == (
        f"data.cache_gb={1.5 * sizes[-1]:g}: the shards that the pieces of a machine (1) read at a time, and the next "
        f"ones, take up to {sum(sizes[1:]):.3g} GB: give as much, or shards are fetched again and again"
    )
    assert note(2 * sizes[-1], pieces=1) == ""  # the control: enough
    assert f"that the pieces of a machine (2) read at a time, and the next ones, take up to {sum(sizes):.3g}" in note(
        2 * sizes[-1], pieces=2
    )
    assert note(2 * sizes[-1], num_nodes=2) == ""  # a piece for each machine
    assert "the pieces of a machine (3) read" in note(2 * sizes[-1], pieces=4, num_nodes=2, shares=(3.0, 1.0))
    assert note(None) == note(sum(sizes) * 2, window=None) == ""


def wait_until(what: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_shards_are_fetched_ahead(web: WebServer, tmp_path: Path) -> None:
    part = opened(web.url + NAMES, **EACH, window=1).train
    cache = cache_of(part)
    forget(tmp_path)
    part.will_need(0, [ShardNeed(2, 0, 3), ShardNeed(0, 4, 7)])
    wait_until(lambda: cache.counters.of_rank()["fetched"] == 2)
    cache.read(2, 0, 9)
    cache.read(0, 0, 9)
    counts = cache.counters.of_rank()
    assert (counts["hits"], counts["waits"], counts["fetched"]) == (2, 0, 2)
    assert part.read_ahead == shard_cache.FIRST_AHEAD
    cache.read(1, 0, 9)  # it was not listed
    assert cache.counters.of_rank()["waits"] == 1
    assert part.read_ahead == 2 * shard_cache.FIRST_AHEAD


def _read_in_process(part: Any, begin: Any, results: Any) -> None:
    begin.wait()
    results.put([float(image.float().mean()) for image, _ in samples(part)])


@pytest.mark.usefixtures("processes")
def test_processes_share_a_cache_and_fetch_each_shard_once(web: WebServer, tmp_path: Path) -> None:
    part = opened(web.url + NAMES, **EACH).train
    expected = [float(image.float().mean()) for image, _ in samples(part)]
    forget(tmp_path)
    web.sent.clear()
    web.latency = 0.05
    context = get_context("spawn")  # a fork of pytest would have the locks of its threads
    begin, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_read_in_process, args=(part, begin, results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [results.get(timeout=300) for _ in processes] == [expected] * 2
    for process in processes:
        process.join()
    names = [f"train-{number:05}.tar" for number in range(3)]
    assert {name: web.sent[name] for name in names} == {name: (web.folder / name).stat().st_size for name in names}


# --- faults ---


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (404, "there is no such object (3 tries)"),
        (403, "access is denied (403), with the credentials of the environment: 403, message="),
        (500, "the server answers with status 500"),
        ("cut", "tries"),
    ],
)
def test_a_fault_that_stays_ends_in_a_line_with_the_shard(
    web: WebServer, tmp_path: Path, fault: Any, reason: str
) -> None:
    part = opened(web.url + NAMES, **EACH).train
    forget(tmp_path)
    web.fault = lambda path: fault if path == "train-00001.tar" else None
    line = refusal_of(samples, part)
    assert f"{web.url}/train-00001.tar: " in line
    assert reason in line
    assert "start the run again when the server answers, and it goes on from its checkpoint" in line
    web.fault = lambda path: None
    assert len(samples(part)) == 42  # nothing of the fault is kept


def test_a_slow_server_gets_another_request(web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = opened(web.url + NAMES, **EACH).train
    forget(tmp_path)
    monkeypatch.setattr(servers, "CHUNK_SECONDS", 0.2)
    slow = iter([1.0])
    web.fault = lambda path: next(slow, None)
    assert len(samples(part)) == 42
    forget(tmp_path)
    web.fault = lambda path: 1.0 if "train" in path else None
    assert "the server does not answer within 0 s" in refusal_of(samples, opened(web.url + NAMES, **EACH).train)


def test_a_server_that_is_gone_and_comes_back(web: WebServer, tmp_path: Path) -> None:
    part = opened(web.url + NAMES, **EACH).train
    forget(tmp_path)
    web.stop()
    assert f"{web.url}/train-0000" in (line := refusal_of(samples, part))
    assert "Connect" in line
    cache_of(part).server.retry_seconds = 30
    threading.Timer(0.3, web.start).start()
    assert len(samples(part)) == 42


@pytest.mark.parametrize("size_changes", [True, False])
def test_a_shard_that_was_replaced_is_refused(web: WebServer, tmp_path: Path, size_changes: bool) -> None:
    part = opened(web.url + NAMES, **EACH).train
    forget(tmp_path)
    file = web.folder / "train-00001.tar"
    content = bytearray(file.read_bytes())
    content[600] ^= 1
    file.write_bytes(content[: len(content) - 1024 * size_changes])
    line = refusal_of(samples, part)
    assert f"{web.url}/train-00001.tar: was replaced after it was indexed: make the index again by `lockstep" in line


def test_a_shard_that_was_replaced_is_indexed_again_by_the_next_run(
    shards: Path, s3: dict[str, str], tmp_path: Path
) -> None:
    url = upload(shards, s3, "replaced")
    first = opened(url, **EACH)
    images = {f"cat/{number}.png": (shards.parent / "folder/train/cat/1.png").read_bytes() for number in (90, 91)}
    write_tar(tmp_path / "new" / "train-00001.tar", images)
    upload(tmp_path / "new", s3, "replaced")
    second = opened(url, **EACH)
    assert len(second.train) == len(first.train) - 14 + 2
    assert second.fingerprint != first.fingerprint


def test_an_image_that_was_replaced_by_one_of_its_name_and_size_is_other_data(shards: Path, web: WebServer) -> None:
    """A new run by a pattern finds it, though it has the index of what was there before."""
    before, local = opened(web.url + NAMES, window=2, **EACH), opened(shards, window=2, **EACH)
    flip(web.folder / "train-00001.tar")
    after = opened(web.url + NAMES, window=2, **EACH)
    assert not same(after.train, before.train)
    assert after.fingerprint == before.fingerprint == local.fingerprint
    record = {"fingerprint": before.fingerprint, "content": before.content}
    assert is_other_data(record, after)
    assert not is_other_data(record, before)
    assert not is_other_data(record, local)  # a folder's images may be those of a server


def test_a_shard_without_a_version_is_read_again_for_a_new_index(web: WebServer) -> None:
    web.versions = False

    def sha256s() -> list[str]:
        remote = Remote(web.url + NAMES, {"image": None, "label": "label"}, retry_seconds=1, anew=True)
        return [known.sha256 for known, _ in remote.records.all(remote.stats)]

    before = sha256s()
    assert sha256s() == before
    flip(web.folder / "train-00001.tar")
    assert [one == other for one, other in zip(sha256s(), before, strict=True)] == [True, False, True, True, True, True]


def test_a_full_disk_ends_in_a_line(web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = opened(web.url + NAMES, **EACH).train
    forget(tmp_path)

    def full(self: Any, file: Any, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shard_cache.ShardCache, "_write", full)
        line = refusal_of(samples, part)
    assert f"{tmp_path}/cache/lockstep/shards: no space for train-0000" in line
    assert "free space, or give another data.cache or a smaller data.cache_gb" in line
    assert len(samples(part)) == 42


@pytest.fixture
def small_disk(processes: None, tmp_path: Path) -> Iterator[Any]:
    """Return a function that mounts a file system of some bytes, where that is allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mounted(size: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("only root may mount a file system")
        return folder

    yield mounted
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


@pytest.mark.parametrize("cache_gb", [None, 1])
def test_a_disk_for_a_part_of_the_shards_is_enough(web: WebServer, small_disk: Any, cache_gb: int | None) -> None:
    """Without a limit the disk is one; with a wrong one it is full, and what nobody needs goes."""
    expected = samples(opened(web.url + NAMES, **EACH).train)  # and the index
    sizes = [(web.folder / f"train-{number:05}.tar").stat().st_size for number in range(3)]
    folder = small_disk(2 * max(sizes) + 30_000)
    assert folder.stat().st_dev != web.folder.stat().st_dev
    part = opened(web.url + NAMES, **EACH, cache=str(folder), cache_gb=cache_gb).train
    actual = samples(part)
    assert same(actual, expected)
    assert sum(path.stat().st_size for path in folder.rglob("*") if len(path.name) == 64) <= 2 * max(sizes) + 30_000


def test_a_disk_for_a_part_of_the_shards_is_enough_for_an_index(web: WebServer, small_disk: Any) -> None:
    """Several shards are indexed at a time, as long as there is room."""
    expected = opened(web.url + NAMES, **EACH)
    sizes = [(web.folder / f"train-{number:05}.tar").stat().st_size for number in range(3)]
    folder = small_disk(max(sizes) + 40_000)
    web.latency = 0.1  # so that they are fetched at the same time
    index_dir = str(web.folder.parent / "other")
    data = opened(web.url + NAMES, **EACH, cache=str(folder), index_dir=index_dir)
    assert data.fingerprint == expected.fingerprint


def test_what_a_full_disk_took_half_is_not_written_twice(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(opened(web.url + NAMES, **EACH).train)
    monkeypatch.setattr(shard_cache.ShardCache, "_remove_oldest", lambda self, *arguments: 0.0)
    pwrite, calls = os.pwrite, itertools.count()

    def full_at_second(file: int, content: Any, start: int) -> int:
        if next(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, content[: len(content) // 2 + 1], start)

    monkeypatch.setattr(shard_cache.os, "pwrite", full_at_second)
    content = bytes(range(256)) * 200
    with open(tmp_path / "file", "w+b") as file:
        cache._write(file, content[:100])
        cache._write(file, content[100:])
    assert (tmp_path / "file").read_bytes() == content


def test_limits_that_are_refused(web: WebServer) -> None:
    def line(**changes: Any) -> str:
        return refusal_of(opened, web.url + NAMES, **EACH, **changes)

    assert "data.cache_gb=0: must be a number above 0, or null" in line(cache_gb=0)
    assert "retry_seconds=-1: must be a number of seconds" in line(retry_seconds=-1)
    opened(web.url + NAMES, **EACH)  # the index
    largest = max((web.folder / name).stat().st_size for name in files_in(web.folder)) / shard_cache.GIB
    assert "the largest shard alone takes" in line(cache_gb=largest / 2)
    assert "without data.window every step reads from all of them: give data.window=4" in line(cache_gb=1.5 * largest)
    assert len(samples(opened(web.url + NAMES, **EACH, cache_gb=1.5 * largest, window=1).train)) == 42
    assert "with data.window=2 a piece reads 2 shards at a time, which may take " in line(
        cache_gb=1.5 * largest, window=2
    )
    assert len(opened(web.url + NAMES, **EACH, cache_gb=2 * largest, window=2).train) == 42


@pytest.mark.parametrize(
    ("protocol", "package"),
    [("s3", "s3fs"), ("gs", "gcsfs"), ("az", "adlfs"), ("abfs", "adlfs"), ("hf", "huggingface_hub")],
)
def test_a_driver_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, protocol: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
    line = refusal_of(opened, f"{protocol}://bucket/images")
    assert line == f"{protocol}://bucket/images: {protocol}:// needs {package}: pip install {package}"


def test_the_options_of_fsspec_reach_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from variables FSSPEC_GS_TOKEN and the like, and from files of the user."""
    from fsspec import AbstractFileSystem
    from fsspec import config as options

    made: list[dict[str, Any]] = []

    class Recorded(AbstractFileSystem):
        protocol = "gs"
        cachable = False

        def __init__(self, **chosen: Any) -> None:
            super().__init__(**chosen)
            made.append(chosen)

    conf: dict[str, Any] = {}
    options.set_conf_env(conf, {"FSSPEC_GS_TOKEN": "anon", "FSSPEC_GS_ENDPOINT_URL": "http://127.0.0.1:9"})
    monkeypatch.setattr(options, "conf", conf)
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "gs", Recorded)
    assert servers.open_file_system("gs://bucket/images")[1] == "bucket/images"
    assert made == [{"token": "anon", "endpoint_url": "http://127.0.0.1:9"}]


ETAG, MD5 = {"etag": "CL1="}, {"md5Hash": "g5re7K7ZRuiasLhEs2zLiw=="}
IN_HEX = "839adeecaed946e89ab0b844b36ccb8b"


@pytest.mark.parametrize(
    ("info", "md5"),
    [
        ({**ETAG, **MD5}, IN_HEX),  # of GCS
        ({"etag": '"0x2"', "content_settings": {"content_md5": bytearray(range(16))}}, bytes(range(16)).hex()),  # Azure
        ({"ETag": f'"{IN_HEX}"'}, IN_HEX),  # of S3
        ({"etag": '"0x2"', "content_settings": {"content_md5": None}}, None),
        ({**ETAG, "md5Hash": "no!"}, None),
        ({}, None),
    ],
)
def test_the_md5_of_an_object_is_known_where_the_server_states_it(info: dict[str, Any], md5: str | None) -> None:
    assert servers.md5_of(servers.stat_of({"size": 5, **info})[1]) == md5


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (ETAG, {**ETAG, **MD5}, True),  # an index that has the ETag alone
        (MD5, {**ETAG, **MD5}, True),
        ({"etag": "CL2=", **MD5}, {**ETAG, **MD5}, True),  # with other metadata
        ({"etag": "CL2="}, {**ETAG, **MD5}, False),
        ({**ETAG, "size": 6}, ETAG, False),
        ({**ETAG, "size": None}, ETAG, True),
        ({}, ETAG, True),
        ({"created": 1.5}, {"created": datetime.fromtimestamp(1.5, UTC)}, True),  # a driver that lists other times
        ({"mtime": 1}, {"mtime": datetime(1970, 1, 1, 0, 0, 1)}, True),  # in UTC
        ({"created": 2.5}, {"created": datetime.fromtimestamp(1.5, UTC)}, False),
    ],
)
def test_objects_are_the_same_if_a_line_of_their_versions_is(one: Any, other: Any, same: bool) -> None:
    stats = [servers.stat_of({"size": 5, **each}) for each in (one, other)]
    assert servers.is_same(*stats) is servers.is_same(*reversed(stats)) is same


def test_what_gcs_forbids_is_not_tried_for_long() -> None:
    """Its driver raises an OSError with a text, and errors with a code."""
    coded = RuntimeError("no, 401")
    coded.status, coded.code = "FAILED", 401  # type: ignore[attr-defined]
    for error, number in ((OSError("Forbidden: bucket/a.tar\nno"), 403), (coded, 401)):
        assert servers.is_permanent(error)
        assert servers.reason(error).startswith(f"access is denied ({number}), with the credentials of the environment")
    assert not servers.is_permanent(OSError("no route"))


def test_a_driver_that_lacks_an_account_is_no_missing_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    class Azure(fsspec.AbstractFileSystem):  # type: ignore[name-defined]
        def __init__(self, **chosen: Any) -> None:
            raise ValueError("Must provide either a connection_string\nor account_name with credentials!!")

    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "az", Azure)
    line = refusal_of(opened, "az://container/images")
    assert line.startswith("az://container/images: az:// can't be opened: Must provide either a connection_string or ")
    assert line.endswith("correct the URL, or set what the driver needs in the environment (lockstep docs shards)")


def test_a_protocol_that_does_not_exist_is_refused() -> None:
    assert "there is no protocol nowhere: known are" in refusal_of(opened, "nowhere://bucket/images")


@pytest.mark.parametrize(
    "url",
    [
        "https://me:secret@host/a-{0..1}.tar",
        "s3://key:secret@bucket/images",
        "https://host/a.tar?token=secret",
        "https://host/a.tar?X-Amz-Signature=secret",
        "simplecache::s3://secret/images",
        "abfs://name:secret@account/images",
        "https://host/a#secret",
    ],
)
def test_a_url_with_a_secret_is_refused_without_it(url: str) -> None:
    assert "secret" not in (line := refusal_of(opened, url))
    assert line.startswith("data_dir: ")


@pytest.mark.parametrize("name", ["image_folder", "mnist", "cifar10"])
def test_a_url_is_for_shards(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = refusal_of(open_data, config(name), "s3://bucket/images")
    assert line == f"{name}: data_dir=s3://bucket/images is a URL: must be a folder (data=shards reads shards of a URL)"
    assert not [*tmp_path.iterdir()]


def test_a_url_stays_one_in_the_config() -> None:
    for typed, expected in {
        "s3://bucket/images/": "s3://bucket/images",
        "file:///images/x": "/images/x",
        "abfs://images@account.dfs.core.windows.net/x": "abfs://images@account.dfs.core.windows.net/x",
        "images:2": str(Path("images:2").absolute()),
    }.items():
        assert check(composed(f"data_dir='{typed}'")).data_dir == expected


def test_patterns_that_are_refused() -> None:
    assert "{a} is no pattern" in refusal_of(opened, "http://127.0.0.1:9/{a}.tar")
    assert "the braces of" in refusal_of(opened, "http://127.0.0.1:9/{0..1.tar")
    assert "{5..2} names 0 shards" in refusal_of(opened, "http://127.0.0.1:9/{5..2}.tar")
    assert "{0..9..0} is no pattern" in refusal_of(opened, "http://127.0.0.1:9/{0..9..0}.tar")
    assert "has a *, which is not expanded: name the shards" in refusal_of(opened, "http://127.0.0.1:9/train-*.tar")
    assert "has a *, which is not expanded: name the shards" in refusal_of(opened, "s3://bucket/*/0.tar")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("pipe:curl -s https://host/a.tar", "data_dir: pipe: names a command, and none is run"),
        ("https://host/a.tar::https://host/b.tar", "data_dir: it has ::, which joins URLs or protocols: must be one"),
        ("s3://bucket/a#1", "data_dir: its s3 URL has a #, which begins a URL's fragment: rename"),
        ("https://host/a-{0..1}#b.tar", "write %23 on a web server"),
    ],
)
def test_places_that_webdataset_reads_otherwise(place: str, message: str) -> None:
    assert message in (line := refusal_of(checked_place, place)), line


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("{000..010..2}.tar", ["000.tar", "002.tar", "004.tar", "006.tar", "008.tar", "010.tar"]),
        ("{1..9..04}.tar", ["1.tar", "5.tar", "9.tar"]),
        ("a-{0..1..5}.tar", ["a-0.tar"]),
    ],
)
def test_steps_in_braces(pattern: str, names: list[str]) -> None:
    assert expanded(pattern) == names


def test_the_url_of_one_shard(shards: Path, web: WebServer, tmp_path: Path) -> None:
    one = opened(f"{web.url}/train-00001.tar", **EACH)
    (tmp_path / "one").mkdir()
    shutil.copy(shards / "train-00001.tar", tmp_path / "one")
    assert same(one.train, opened(tmp_path / "one", **EACH).train)


# --- what a server answers ---


class Answers:
    """A server that gives one answer to each request: a status, a body and headers, by the method."""

    def __init__(self, answer: Any) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                status, body, headers = answer(self.command, self.path)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *arguments: Any) -> None:
        self.server.shutdown()
        self.server.server_close()


def s3_error(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>it means {code}</Message></Error>".encode()


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "InvalidObjectState", "the credentials of the environment: it means InvalidObjectState"),
        (403, "SignatureDoesNotMatch", "access is denied (403), with the credentials of the environment: it means Sig"),
        (400, "ExpiredToken", "the credentials of the environment: it means ExpiredToken"),
        (404, "NoSuchBucket", "there is no such object"),
    ],
)
def test_what_s3_answers_is_named(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, status: int, code: str, message: str
) -> None:
    with Answers(lambda method, path: (status, s3_error(code), {"Content-Type": "application/xml"})) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        with pytest.raises(servers.Unavailable) as error:
            servers.Server("s3://images/x", 1).read("a.tar", 10, lambda content: None)
        assert message in str(error.value)
        with pytest.raises(UserError) as of_list:
            servers.Server("s3://images/x", 1).files()
        assert message in str(of_list.value)
        hint = "if its objects may be read, a pattern names them: s3://images/x/train-{000..099}.tar"
        assert (hint in str(of_list.value)) == (status == 403)


def test_a_bucket_whose_list_is_denied_is_read_by_a_pattern(
    shards: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the line on the denied list says."""

    def answer(method: str, path: str) -> Any:
        file = shards / path.partition("?")[0].rpartition("/")[2]
        if "list-type" in path or not file.is_file():
            return 403, s3_error("AccessDenied"), {"Content-Type": "application/xml"}
        return (
            200,
            file.read_bytes(),
            {"ETag": f'"{len(file.name)}-x"', "Last-Modified": "Wed, 01 Jul 2026 10:00:00 GMT"},
        )

    with Answers(answer) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        assert "a pattern names them" in refusal_of(opened, "s3://images/same")
        assert len(opened("s3://images/same" + NAMES, **EACH).train) == 42


def test_without_credentials_the_remedy_is_named() -> None:
    class NoCredentialsError(Exception):
        pass

    assert "a public bucket needs FSSPEC_S3_ANON=true there" in servers.reason(NoCredentialsError())


@pytest.mark.parametrize("pattern", [NAMES, ""])
def test_a_page_to_log_in_is_no_damaged_index(pattern: str) -> None:
    page = b"<!DOCTYPE html><html>log in</html>"
    with Answers(lambda method, path: (200, page, {"Content-Type": "text/html", "ETag": '"1"'})) as server:
        line = refusal_of(opened, server.url + pattern)
    assert "is a web page or an error message, as servers send to who must log in" in line, line
    assert ("index.json" if not pattern else "train-0000") in line


def test_replicas_with_unlike_etags_are_named(shards: Path) -> None:
    """The bytes are the same, and nothing was replaced."""
    heads: Counter[str] = Counter()

    def answer(method: str, path: str) -> Any:
        heads[path] += method == "HEAD"
        file = shards / path.rpartition("/")[2]
        if not file.is_file():
            return 404, b"", {}
        return 200, file.read_bytes(), {"ETag": f'"replica-{heads[path] % 2}"'}

    with Answers(answer) as server:
        line = refusal_of(opened, server.url + "/{train,test}-00000.tar", **EACH)
    assert "the server states two versions (ETags) in turns, as replicas do: let all of them" in line, line


@pytest.mark.parametrize("form", ["seconds", "date", "too long"])
def test_a_server_that_asks_to_wait_is_waited_for(web: WebServer, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    in_two_seconds = format_datetime(datetime.now(UTC) + timedelta(seconds=7), usegmt=True)
    value = {"seconds": "3", "date": in_two_seconds, "too long": "9999"}[form]
    pauses: list[Any] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    tries = itertools.count()

    def answer(method: str, path: str) -> Any:
        return (429, b"", {"Retry-After": value}) if next(tries) < 2 else (200, b"content", {})

    with Answers(answer) as server:
        read = partial(servers.Server(server.url, 60).read, "a", -1, pauses.append)
        if form == "too long":
            with pytest.raises(servers.Unavailable, match="status 429"):
                read()
            assert pauses == []
            return
        read()
    assert pauses[-1] == b"content"
    assert all(3 <= pause <= 8 for pause in pauses[:-1])
    assert len(pauses) == 3


# --- file systems without locks ---


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_without_locks_two_processes_never_write_one_file(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    part = opened(web.url + NAMES, **EACH).train
    expected = samples(part)
    forget(tmp_path)

    def no_locks(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    web.latency = 0.1
    parts = set()
    complete = shard_cache.ShardCache._complete

    def noted(self: Any, known: Any, file: Any, *arguments: Any) -> Any:
        assert file.name not in parts
        parts.add(file.name)
        return complete(self, known, file, *arguments)

    monkeypatch.setattr(shard_cache.ShardCache, "_complete", noted)
    others = [opened(web.url + NAMES, **EACH).train for _ in range(3)]
    results: list[Any] = []
    threads = [threading.Thread(target=lambda each=each: results.append(samples(each))) for each in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for each in results:
        assert same(each, expected)
    assert not [*(tmp_path / "cache").rglob("*.part")]


def test_machines_that_read_other_shards_do_not_start(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose images are in a folder may read the same."""
    monkeypatch.setattr(provenance, "code_sha256", lambda: "code")
    config = check(composed("data=shards", f"data_dir='{web.url + NAMES}'"))
    gathered: list[Any] = []

    def gather(fact: Any) -> list[Any]:
        gathered.append(fact)
        return [*gathered]

    monkeypatch.setattr(provenance, "gather_objects", gather)
    before, local = opened(web.url + NAMES, **EACH), opened(web.folder, **EACH)
    flip(web.folder / "train-00001.tar")
    for splits in (local, before, before, local):
        provenance.check_same_on_all_ranks(config, splits)
    line = refusal_of(provenance.check_same_on_all_ranks, config, opened(web.url + NAMES, **EACH))
    assert line.startswith("machines differ: the SHA-256 of the data's shards is ")
    assert "(rank 4), but " in line
