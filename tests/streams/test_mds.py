"""MosaicML's shards, as its own writer wrote them (tests/mds_shards/write.py), on the disk and on a server."""

import hashlib
import json
import re
import shutil
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import refusal_of
from store_servers import WebServer
from written_mds import EXPECTED, SHARDS, as_parquet, as_tar, write_mds
from written_shards import opened

from lockstep.data.datasets import innermost_dataset
from lockstep_streams.remote import Remote

FORMS = ("raw", "zstd")
BY_PLACE: dict[str, Any] = {"window": 2, "val_fraction": 0, "test_fraction": 0}


def copied(form: str, tmp_path: Path) -> Path:
    if form == "zstd":
        pytest.importorskip("pyarrow", reason="pip install -e .[huggingface] brings it")
    return Path(shutil.copytree(SHARDS / form, tmp_path / form))


def read(part: Any) -> list[list[str]]:
    files = innermost_dataset(part)
    contents = (files.encoded(number).getvalue() for number in range(len(files)))
    return [
        [str(label), hashlib.sha256(content).hexdigest()]
        for label, content in zip(files.labels.tolist(), contents, strict=True)
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("servers")
def test_images_and_labels_are_those_that_were_written(tmp_path: Path, form: str) -> None:
    folder = copied(form, tmp_path)
    web = WebServer(folder)
    for place in (folder, web.url):  # the second lists nothing: the files index.json name the shards
        data = opened(place, **BY_PLACE)
        assert data.spec.classes == ("0", "1", "2")
        for part, shards in EXPECTED.items():
            assert read(getattr(data, part)) == [sample for shard in shards for sample in shard]
        assert data.shard_borders.tolist() == np.cumsum([0, *map(len, EXPECTED["train"])]).tolist()
    web.stop()


@pytest.mark.usefixtures("servers")
def test_all_formats_have_the_same_samples_in_the_same_places(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install -e .[huggingface] brings it")
    places = [as_tar(tmp_path / "tar"), as_parquet(tmp_path / "parquet"), copied("raw", tmp_path)]
    web = WebServer(tmp_path)
    count = "{train-{00000..00003},val-00000,test-00000}"  # nested braces are refused
    assert "the braces of" in refusal_of(opened, f"{web.url}/tar/{count}.tar")
    pattern = "/parquet/{train-00000,train-00001,train-00002,train-00003,val-00000,test-00000}.parquet"
    expected = {part: [sample for shard in shards for sample in shard] for part, shards in EXPECTED.items()}
    for place in (*places, web.url + pattern):
        data = opened(place, **BY_PLACE)
        assert {part: read(getattr(data, part)) for part in EXPECTED} == expected
        assert data.shard_borders.tolist() == [0, 16, 32, 48, 60]
    again = opened(web.url + pattern, **BY_PLACE)  # another machine, which has the index and no shards
    shutil.rmtree(tmp_path / "cache" / "lockstep" / "shards")
    assert read(again.train) == expected["train"]
    web.stop()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"label": "more"},
            "the column more has the encoding pkl, which is never unpickled: known are str, str_int, int",
        ),
        ({"label": "notes"}, "the column notes has the encoding json, which is not read: known are str"),
        ({"image": "label"}, "the column label has the encoding str, which is not read: known are jpeg, "),
        ({"image": "more"}, "the column more has the encoding pkl, which is never unpickled: known are jpeg"),
        ({"label": "class"}, "no column class, its columns are image (bytes), label (str), more (pkl), notes (json): "),
    ],
)
def test_columns_that_are_refused(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    line = refusal_of(opened, copied("zstd", tmp_path), **changes)
    assert "train/shard.00000.mds.zstd: " in line
    assert message in line


def test_shards_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied("raw", tmp_path)
    shard = folder / "train" / "shard.00001.mds"
    whole = shard.read_bytes()

    def message(content: bytes) -> str:
        shard.write_bytes(content)
        return refusal_of(opened, folder)

    for damaged in (whole[:-1], b"", whole[:3], whole + b"\0", b"\xff" * len(whole), whole[:200] + whole[210:]):
        assert f"{shard}: damaged MDS file (" in message(damaged)
    start = int(np.frombuffer(whole, "<u4", 1, 4)[0])
    sizes = np.array([1 << 31], "<u4").tobytes()
    assert "its columns do not fit its size) at sample 0" in message(whole[:start] + sizes + whole[start + 4 :])
    for old, new in ((b'"jpeg"', b'"pkl!"'), (b'"int"', b'"pkl"')):
        assert "which is n" in message(whole.replace(old, new))
    shard.write_bytes(whole)
    shard.rename(folder / "train" / "shard.00001.mds.gz")
    assert "shard.00001.mds: train/index.json names it: copy it, or remove index.json" in refusal_of(opened, folder)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "need pyarrow: pip install pyarrow" in refusal_of(
        opened, Path(shutil.copytree(SHARDS / "zstd", tmp_path / "z"))
    )


@pytest.mark.parametrize("head", [[], [3, 0, 0, 0, 5000], [1 << 30]])
def test_a_small_file_with_a_huge_content_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: list[int]
) -> None:
    pa = pytest.importorskip("pyarrow", reason="pip install -e .[huggingface] brings it")
    monkeypatch.setattr("lockstep_streams.mds.MOST_BYTES", 4 << 20)
    shard = copied("zstd", tmp_path) / "train" / "shard.00001.mds.zstd"
    with pa.CompressedOutputStream(str(shard), "zstd") as stream:
        stream.write(np.array(head, "<u4").tobytes())
        for _ in range(64):
            stream.write(bytes(1 << 20))
    tracemalloc.start()
    line = refusal_of(opened, tmp_path / "zstd")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "shard.00001.mds.zstd: damaged MDS file (its content is larger than " in line
    assert most < 32 << 20


@pytest.mark.usefixtures("servers")
def test_an_index_json_that_names_other_things_is_refused(tmp_path: Path) -> None:
    folder = copied("raw", tmp_path)
    file = folder / "train" / "index.json"
    content = json.loads(file.read_text())
    web = WebServer(folder)
    for change, message in (
        ({"format": "xyz"}, "its shards are xyz by zstd: must be mds, zstd"),
        ({"compression": "br:3"}, "its shards are mds by br: must be mds, zstd"),
        ({"raw_data": {"basename": "../../secret"}}, "names a file elsewhere"),
        ({"raw_data": 3}, "names no MDS shards ("),
    ):
        first, *rest = content["shards"]
        file.write_text(json.dumps({"shards": [{**first, **change}, *rest]}))
        assert f"{web.url}/train/index.json: {message}" in refusal_of(opened, web.url)
    web.stop()


def in_memory(folder: Path) -> str:
    """Copy a folder to a server that lists its objects. Return its URL."""
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://{folder.name}-{folder.stat().st_ino}"
    files = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            files.pipe_file(f"{url}/{path.relative_to(folder)}", path.read_bytes())
    return url


@pytest.mark.parametrize("place", [str, in_memory])
def test_shards_in_two_forms_or_of_an_earlier_data_set_are_refused(tmp_path: Path, place: Any) -> None:
    """MosaicML's writer leaves unpacked shards beside compressed ones, and those of an earlier, longer data set."""

    def count(where: str) -> int:
        if place is in_memory:
            return len(Remote(where, {"image": None, "label": "label"}).paths)
        return int(re.search(r"(\d+) files", opened(where, **BY_PLACE).about).group(1))  # type: ignore[union-attr]

    folder = copied("zstd", tmp_path)
    train = folder / "train"
    assert count(place(folder)) == 6
    shutil.copy(SHARDS / "raw" / "train" / "shard.00001.mds", train)
    line = refusal_of(opened, place(folder), **BY_PLACE)
    assert "/train/shard.00001.mds.zstd and shard.00001.mds would be the same images twice: remove one of them" in line
    (train / "shard.00001.mds").rename(train / "shard.00007.mds")
    if place is in_memory:
        pytest.importorskip("fsspec").filesystem("memory").rm(place(folder) + "/train/shard.00001.mds")
    line = refusal_of(opened, place(folder), **BY_PLACE)
    assert "/train/shard.00007.mds: the index.json beside it does not name it: remove one of them" in line
    (train / "shard.00007.mds").unlink()
    (train / "shard.00000.mds.zstd").rename(tmp_path / "shard.00000.mds.zstd")  # as a copy that was cut leaves it
    if place is in_memory:
        for name in ("shard.00000.mds.zstd", "shard.00007.mds"):
            pytest.importorskip("fsspec").filesystem("memory").rm(place(folder) + f"/train/{name}")
    line = refusal_of(opened, place(folder), **BY_PLACE)
    assert "/train/shard.00000.mds: train/index.json names it: copy it, or remove index.json" in line
    shutil.move(tmp_path / "shard.00000.mds.zstd", train)
    raw = copied("raw", tmp_path)
    shutil.copy(train / "index.json", raw / "train")  # it names compressed shards, which were unpacked
    assert count(place(raw)) == 6


@pytest.mark.parametrize("place", [str, in_memory])
def test_a_folder_whose_mds_shards_are_all_missing_is_refused(tmp_path: Path, place: Any) -> None:
    """A copy of the shards that was cut may have the index.json of a part alone: nothing would be tested."""
    folder = copied("raw", tmp_path)
    for shard in (folder / "test").glob("*.mds"):
        shard.unlink()
    line = refusal_of(opened, place(folder), **BY_PLACE)
    assert "/test/shard.00000.mds: test/index.json names it: copy it, or remove index.json" in line
    for strange in (
        '{"chunks": []}',
        '{"shardlist": []}',
        "[]",
        '{"shards": [{"raw_data": {"basename": "a"}, "format": 3}]}',
    ):
        (folder / "test" / "index.json").write_text(strange)  # of another program
        assert opened(place(folder), **BY_PLACE).test is None
    (folder / "test" / "index.json").write_text('{"shards": [{"raw_da')
    assert "/test/index.json: damaged (" in refusal_of(opened, place(folder), **BY_PLACE)
    (folder / "test" / "index.json").unlink()
    if place is in_memory:
        pytest.importorskip("fsspec").filesystem("memory").rm(place(folder) + "/test/index.json")
    merged = {"raw_data": {"basename": "test/shard.00000.mds"}, "format": "mds"}  # as merge_index writes it
    (folder / "index.json").write_text(json.dumps({"shards": [merged]}))
    line = refusal_of(opened, place(folder), **BY_PLACE)
    assert "/test/shard.00000.mds: index.json names it: copy it, or remove index.json" in line


def hashed(folder: Path, kinds: tuple[str, ...]) -> Path:
    """Write hashes of the shards into the files index.json, as MosaicML's writer does."""
    import xxhash

    for index in folder.rglob("index.json"):
        content = json.loads(index.read_text())
        for shard in content["shards"]:
            for each in filter(None, (shard["raw_data"], shard["zip_data"])):
                file = index.parent / each["basename"]
                data = file.read_bytes() if file.exists() else b""
                each["hashes"] = {
                    kind: getattr(xxhash if kind.startswith("xxh") else hashlib, kind)(data).hexdigest()
                    for kind in kinds
                    if kind != "other"
                } | {kind: "0" for kind in kinds if kind == "other"}
        index.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("kinds", [("sha1",), ("xxh64",), ("sha1", "xxh64", "other"), ("xxh3_128", "sha256")])
@pytest.mark.parametrize("form", ["raw", "zstd"])
@pytest.mark.parametrize("place", [str, in_memory])
def test_hashes_in_index_json_are_checked(tmp_path: Path, kinds: tuple[str, ...], form: str, place: Any) -> None:
    pytest.importorskip("xxhash")
    folder = hashed(copied(form, tmp_path), kinds)
    assert len(opened(place(folder)).train) > 0
    shard = sorted((folder / "train").glob("*.mds*"))[1]
    content = bytearray(shard.read_bytes())
    content[-40] ^= 1
    shard.write_bytes(content)
    line = refusal_of(opened, place(folder))
    assert f"{shard.name}: damaged: its " in line, line
    assert "is not that in index.json: it must be written or copied again" in line


def test_hashes_that_cannot_be_computed_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xxhash")
    folder = hashed(copied("raw", tmp_path), ("xxh64",))
    monkeypatch.setitem(sys.modules, "xxhash", None)
    opened(folder)
    assert "the hashes xxh64 of MDS shards are not checked: pip install xxhash checks them" in caplog.text


@pytest.mark.parametrize("kind", ["jpeg_array", "jpegarray", "list[jpeg]"])
def test_several_images_in_a_sample_are_refused(tmp_path: Path, kind: str) -> None:
    columns = {"image": kind, "label": "str"}
    with open(tmp_path / "shard.00000.mds", "wb") as file:
        write_mds(file, columns, 1 << 20, 1, [{"image": b"x", "label": b"a"}])
    wanted = f"the column image has the encoding {kind}, which has several images, and a sample is one: known are jpeg"
    assert wanted in refusal_of(opened, tmp_path)


def test_a_quality_beside_the_encoding_of_a_column(tmp_path: Path) -> None:
    folder = copied("raw", tmp_path)
    count_before = len(opened(folder).train)
    for shard in folder.rglob("*.mds"):
        old = shard.read_bytes()
        (count,) = np.frombuffer(old, "<u4", 1)
        if b'"jpeg"' not in old:
            continue
        starts = np.frombuffer(old, "<u4", count + 1, 4) + 3
        head = 4 + 4 * (count + 1)
        shard.write_bytes(old[:4] + starts.astype("<u4").tobytes() + old[head:].replace(b'"jpeg"', b'"jpeg:90"', 1))
        index = shard.parent / "index.json"
        index.write_text(index.read_text().replace('"hashes": {"', '"other": {"'))
    assert len(opened(folder).train) == count_before
