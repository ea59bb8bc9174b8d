"""What a tar file means: labels wherever they lie, no label that is passed over, parts, and where its images end."""

import gzip
import io
import json
import os
import shutil
import sys
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import written_shards
from small_data import refusal_of
from written_shards import picture, write_folder, write_parquet, write_tar

from lockstep.data.datasets import innermost_dataset
from lockstep.errors import UserError
from lockstep_streams import shard_index, shard_scan
from lockstep_streams.shards import part_of

opened = partial(written_shards.opened, val_fraction=0, test_fraction=0)


def refusal(folder: Path, **changes: Any) -> str:
    return refusal_of(opened, folder, **changes)


def labels(folder: Path, **changes: Any) -> dict[str, str]:
    """Return the class of each image."""
    data = opened(folder, **changes)
    images = innermost_dataset(data.train)
    classes = [data.spec.classes[number] for number in images.labels.tolist()]
    return dict(zip(map(os.fsdecode, images.names.tolist()), classes, strict=True))


def in_folders(count: int = 8) -> dict[str, bytes]:
    """Return images in two folders."""
    return {f"b{number % 2}/{number}.png": picture(number) for number in range(count)}


def by_parity(members: dict[str, bytes], ending: str, text: Any) -> dict[str, bytes]:
    """Return labels for the images of some members: `even` or `odd`, by the number that begins their names."""
    made = {}
    for name in members:
        folder, _, file = name.rpartition("/")
        number = int(file.partition(".")[0])
        made[f"{folder}/{file.rpartition('.')[0]}.{ending}"] = text(("even", "odd")[number // 2 % 2]).encode()
    return made


def plain(label: str) -> str:
    return label


def as_json(label: str) -> str:
    return json.dumps({"label": label, "kind": label[:1]})


FIRST = in_folders()
DOTTED = {name.replace(".png", ".5.png"): content for name, content in FIRST.items()}


@pytest.mark.parametrize("ending", ["cls", "txt", "json", "JSON"])
@pytest.mark.parametrize("images", [FIRST, DOTTED], ids=["plain", "dots in keys"])
@pytest.mark.parametrize("place", ["behind all images", "before all images", "beside", "reversed"])
def test_a_label_is_used_wherever_it_lies(tmp_path: Path, ending: str, images: dict[str, bytes], place: str) -> None:
    of_labels = by_parity(images, ending, plain if ending in ("cls", "txt") else as_json)
    pairs = zip(images.items(), of_labels.items(), strict=True)
    members = {
        "behind all images": {**images, **of_labels},
        "before all images": {**of_labels, **images},
        "beside": dict(each for pair in pairs for each in pair),
        "reversed": {**images, **dict(reversed(of_labels.items()))},
    }[place]
    write_tar(tmp_path / "a.tar", members)
    assert labels(tmp_path) == {name: ("even", "odd")[int(name[3:].split(".")[0]) // 2 % 2] for name in images}


def test_images_of_one_name_have_their_labels_in_order(tmp_path: Path) -> None:
    """As in a shard to which another one was appended with `tar -A`."""
    for name, label in (("a", "x"), ("b", "y")):
        write_tar(tmp_path / f"{name}.tar", {"0.png": picture(), "0.cls": label.encode()})
    with tarfile.open(tmp_path / "a.tar", "a") as tar, tarfile.open(tmp_path / "b.tar") as other:
        for member in other:
            tar.addfile(member, other.extractfile(member))
    (tmp_path / "b.tar").unlink()
    images = innermost_dataset(opened(tmp_path).train)
    assert images.labels.tolist() == [0, 1]


def each(ending: str, content: bytes, of: dict[str, bytes] = FIRST) -> dict[str, bytes]:
    return {name.replace(".png", f".{ending}"): content for name in of}


REFUSED: dict[str, tuple[dict[str, bytes], dict[str, Any], str]] = {
    "labels elsewhere": (
        {**FIRST, **{f"labels/{number}.txt": b"1" for number in range(8)}},
        {},
        "labels/0.txt may hold labels, and the folder of b0/0.png would be one: write labels as <key>.cls",
    ),
    "some lack a label": ({**FIRST, "b0/0.json": b'{"label": 1}'}, {}, "b1/1.png has no .cls, .txt or .json member"),
    "an update of a label": ({**FIRST, **each("cls", b"1")}, {"twice": "b0/0.cls"}, "b0/0.cls 2 times: remove what"),
    "the key is missing": ({**FIRST, **each("json", b'{"x": 1}')}, {}, "b0/0.json has no key label, its keys are x"),
    "data.label is missing": (
        {**FIRST, **each("json", b'{"label": 1}')},
        {"label": "klass"},
        "b0/0.json has no key klass, its keys are label: choose by data.label=<key>, or data.label=null",
    ),
    "data.label is missing in some": (
        {**FIRST, **each("json", b'{"klass": 1}'), "b1/3.json": b'{"label": 1}'},
        {"label": "klass"},
        "b1/3.json has no key klass",
    ),
    "data.label beside a caption": (
        {**FIRST, **each("txt", b"a cat"), **each("json", b"{}")},
        {"label": "klass"},
        "b0/0.json has no key klass, it has no key",
    ),
    "data.label beside .cls": ({**FIRST, **each("cls", b"1")}, {"label": "klass"}, "b0/0.png has no .json member"),
    "data.label without members": (FIRST, {"label": "klass"}, "b0/0.png has no .json member, which must have the key"),
    "two labels": (
        {**FIRST, **each("txt", b"a cat"), **each("json", b'{"label": 1}')},
        {},
        "b0/0.png has two labels, '1' in b0/0.json and 'a cat' in b0/0.txt: remove one of them",
    ),
    "no object": ({**FIRST, **each("json", b"1")}, {}, "b0/0.json holds no object in braces"),
    "empty": ({**FIRST, **each("cls", b" ")}, {}, "b0/0.png has no label: b0/0.cls must have one"),
    "none": (
        {**FIRST, **by_parity(FIRST, "cls", lambda label: "-1" if label == "odd" else "0")},
        {},
        "the label -1 is",
    ),
    "a table": ({**FIRST, "labels.csv": b"0,1"}, {}, "labels.csv may hold labels"),
    "lines of JSON": ({**FIRST, "b0/metadata.jsonl": b"{}"}, {}, "b0/metadata.jsonl may hold labels"),
    "parts": (
        {**{f"train/{n}": c for n, c in FIRST.items()}, "val/b0/1.png": picture()},
        {},
        "are of two parts: write",
    ),
    "parts with labels": (
        {"train/1.png": picture(), "train/1.cls": b"a", "val/1.png": picture(), "val/1.cls": b"b"},
        {},
        "train/1.png and val/1.png are of two parts",
    ),
    "no image": ({}, {}, "a.tar: no image in it: known are jpg, jpeg, png"),
    "no known image": (
        {"cat/1.webp": picture()},
        {},
        "a.tar: no image in it: passed over 1 file (1 .webp): known are jpg, jpeg, png",
    ),
    "one class": ({"cat/1.png": picture()}, {}, "has only one class, cat: it must have two at least"),
    "neither folder nor label": (
        {**FIRST, "3.png": picture()},
        {},
        "a.tar: 3.png has no label: it must have a .cls, .txt or .json member",
    ),
    "one label": (
        {**FIRST, "b0/9.cls": b"1", "b0/9.png": picture()},
        {},
        "a.tar: only b0/9.png has one: all images must have a label",
    ),
    "a label without an image": (
        {"1.cls": b"1", "2.cls": b"1", "2.png": picture()},
        {},
        "a.tar: the label 1.cls has no image: known are jpg",
    ),
    "no text": ({"1.cls": b"\xff", "1.png": picture()}, {}, "1.cls is no text in UTF-8 ('utf-8' codec can't decode"),
    "no JSON": ({"1.json": b"{", "1.png": picture()}, {}, "a.tar: 1.json is no JSON in UTF-8 (Expecting"),
    "two lines": (
        {"1.cls": b"a\nb", "1.png": picture()},
        {},
        "a.tar: the label of 1.png is no class: it must be one line",
    ),
    "a long text": (
        {"1.cls": b"7" * (1 << 21), "1.png": picture()},
        {},
        "a.tar: 1.cls has 2,097,152 bytes: a label must be a short text",
    ),
    "a broken image": ({**FIRST, "b0/9.png": b"none"}, {}, "a.tar: image b0/9.png: repair or remove it"),
    "a part as class": ({f"train/{n}": c for n, c in FIRST.items()}, {}, "its first folder names a part, and must be"),
    **{
        f"a label {text.decode()}": (
            {**FIRST, **each("json", b'{"label": ' + text + b"}")},
            {},
            f"b0/0.json has the label {text.decode()}: must be a whole number or a text",
        )
        for text in (b"1.5", b"true", b"[1, 2]", b"null", b'{"a": 1}', b"NaN")
    },
    **{
        f"beside: {ending}": (
            {**FIRST, **each(ending, b"1")},
            {},
            f"b0/0.{ending} may hold labels, and the folder of b0/0.png would be one",
        )
        for ending in ("id", "label", "index", "cls.txt", "class.txt", "inx", "pyd", "target.json", "npy", "CLASS")
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_label_that_is_not_used_is_refused(tmp_path: Path, case: str) -> None:
    members, options, message = REFUSED[case]
    options = {**options}
    twice = options.pop("twice", None)
    write_tar(tmp_path / "a.tar", members)
    if twice:
        write_tar(tmp_path / "a.tar", {twice: b"2"}, "a")
    for _ in range(2):  # a refused index is not kept
        assert message in (line := refusal(tmp_path, **options)), line
    assert not [*tmp_path.glob(".index/shards-*")] or "one class" in message


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({"README.txt": b"of dogs", "b0/LICENSE.md": b"free"}, {}),
        ({**each("json", b'{"x": 1}'), "labels.csv": b"", "b0/0.id": b"1"}, {"label": None}),
        ({"__MACOSX/b0/0.json": b"{}", "b0/._0.json": b"{}"}, {}),
    ],
    ids=["notes", "data.label=null", "left behind"],
)
def test_folders_are_classes_if_nothing_else_may_be_a_label(
    tmp_path: Path, more: dict[str, bytes], options: dict[str, Any]
) -> None:
    write_tar(tmp_path / "a.tar", {**FIRST, **more})
    assert labels(tmp_path, **options) == {name: name[:2] for name in FIRST}


def test_labels_beside_other_members(tmp_path: Path) -> None:
    """Where each image has a label, further members are no fault, and texts without an image are counted."""
    members = {**FIRST, **by_parity(FIRST, "cls", plain), **each("txt", b"a caption"), **each("id", b"7")}
    members |= {**each("json", b'{"label": 9}'), "stats.json": b'{"count": 8}', **each("note.json", b"{")}
    write_tar(tmp_path / "a.tar", members)
    data = opened(tmp_path)
    assert data.spec.classes == ("even", "odd")
    assert "passed over 1 file (1 .json without an image)" in data.about


def test_a_byte_order_mark_and_a_key_that_is_named(tmp_path: Path) -> None:
    made = by_parity(FIRST, "json", as_json)
    write_tar(
        tmp_path / "a.tar", {**FIRST, **each("txt", b"a cat"), **{k: b"\xef\xbb\xbf" + v for k, v in made.items()}}
    )
    assert {*labels(tmp_path, label="kind").values()} == {"e", "o"}


def test_jpeg_and_webp_in_one_shard(tmp_path: Path) -> None:
    webp = {name.replace("png", "webp"): picture(9, "WEBP") for name in in_folders(4)}
    write_tar(tmp_path / "a.tar", {**{f"b{n}/{n + 10}.JPG": picture(n, "JPEG") for n in range(2)}, **webp})
    assert (
        "4 .webp): known are jpg, jpeg, png (data.image=[jpg,jpeg,png,webp] reads those, too)" in opened(tmp_path).about
    )
    for choice in (["jpg", "webp"], [".JPG", "WebP"]):
        data = opened(tmp_path, image=choice)
        assert len(data.train) == 6
        assert "passed over" not in data.about
    assert "passed over 2 files (2 .jpg other than webp)" in opened(tmp_path, image="webp").about
    for wrong in ([], [""], 3):
        assert "must be" in refusal(tmp_path, image=wrong)


# --- parts ---


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("test-run-3/train/a.tar", "train"),
        ("test-run-3/val/b.tar", "val"),
        ("test-run-3/train-0001.tar", "train"),
        ("validation/7.tar", "val"),
        ("testing/deep/7.tar", "test"),
        ("test/training/a.tar", "train"),
        ("latest/contest.tar", "all"),
        ("train/train-0.tar", "train"),
        ("TRAIN/A.TAR", "train"),
        ("train/val-0.tar", "names train and val: rename it"),
        ("train/test-run/a.tar", "names test and train: rename it"),
        ("x/train-val-0.tar", "names train and val: rename it"),
    ],
)
def test_the_part_is_that_of_the_nearest_name(path: str, part: str) -> None:
    if " " not in part:
        assert part_of("root", path) == part
        return
    with pytest.raises(UserError, match=part):
        part_of("root", path)


def test_shards_of_a_test_run_are_of_the_part_of_their_folder(tmp_path: Path) -> None:
    for part in ("train", "val"):
        write_tar(tmp_path / "test-run-3" / part / "a.tar", FIRST)
    data = opened(tmp_path)
    assert (len(data.train), len(data.val), data.test) == (8, 8, None)


# --- where a tar file ends ---


def padded(content: bytes, record: int) -> bytes:
    """Return a tar file whose last record has another size."""
    content = content.rstrip(b"\0")
    content += bytes(-len(content) % 512 + 1024)
    return content + bytes(-len(content) % record)


def zeros_in_the_middle(content: bytes, first: int, count: int) -> bytes:
    return content[:first] + bytes(count) + content[first + count :]


MANY = in_folders(40)


@pytest.mark.parametrize("damage", ["joined", "rest of zeros", "a header of zeros", "a byte at the end", "all zeros"])
def test_what_lies_behind_the_end_mark_is_refused(tmp_path: Path, damage: str) -> None:
    path = write_tar(tmp_path / "a.tar", MANY)
    content = path.read_bytes()
    with tarfile.open(path) as tar:
        header = tar.getmembers()[20].offset
    path.write_bytes(
        {
            "joined": content + content,
            "rest of zeros": content[:header] + bytes(len(content) - header),
            "a header of zeros": zeros_in_the_middle(content, header, 1024),
            "a byte at the end": content[:-1] + b"\1",
            "all zeros": bytes(len(content)),
        }[damage]
    )
    line = refusal(tmp_path)
    assert "a.tar: truncated or damaged tar file (" in line
    zeros = damage in ("rest of zeros", "all zeros")
    assert ("zeros from byte" if zeros else "an end mark at byte") in line, line
    if damage == "rest of zeros":
        assert f"from byte {header:,} to its end" in line


@pytest.mark.parametrize("record", [512, 10240, 1 << 15, 1 << 18, 1 << 20])
def test_the_last_record_may_be_large(tmp_path: Path, record: int) -> None:
    path = write_tar(tmp_path / "a.tar", MANY)
    path.write_bytes(padded(path.read_bytes(), record))
    assert len(opened(tmp_path).train) == 40


def test_shards_of_a_stream_and_appended_ones_are_whole(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", FIRST, "w|")
    for number in range(30):
        write_tar(tmp_path / "a.tar", {f"b0/more{number}.png": picture()}, "a")
        assert len(opened(tmp_path).train) == 9 + number


# --- members of other types ---


def with_member(path: Path, name: str, content: bytes = b"", link: str = "", **changes: Any) -> None:
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo(name)
        info.size, info.linkname = len(content), link
        for key, value in changes.items():
            setattr(info, key, value)
        tar.addfile(info, io.BytesIO(content))


def test_members_of_other_types(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", FIRST)
    with_member(path, "b0/contiguous.png", picture(), type=tarfile.CONTTYPE)
    with_member(path, "b0/hard.png", link="b0/0.png", type=tarfile.LNKTYPE)
    data = opened(tmp_path)
    assert len(data.train) == 9
    assert "1 links" in data.about
    assert "1 links" in opened(tmp_path, image="png").about
    with_member(path, "b0/0.cls", link="b0/1.cls", type=tarfile.LNKTYPE)
    assert "the label b0/0.cls is a link: write the shard again with `tar --dereference" in refusal(tmp_path)


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_sparse_members_are_refused(tmp_path: Path, form: str) -> None:
    path = write_tar(tmp_path / "a.tar", FIRST)
    if form == "gnu":
        header = bytearray(tarfile.TarInfo("b0/sparse.png").tobuf(tarfile.GNU_FORMAT))
        header[156:157] = tarfile.GNUTYPE_SPARSE
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        content = path.read_bytes().rstrip(b"\0")
        content += bytes(-len(content) % 512)
        path.write_bytes(padded(content + header, 10240))
    else:
        pax = {"GNU.sparse.map": "0,1", "GNU.sparse.size": "9", "GNU.sparse.name": "b0/sparse.png"}
        with_member(path, "b0/GNUSparseFile.0/sparse.png", b"x", pax_headers=pax)
    assert "b0/sparse.png is a sparse member: write the shard again without `tar --sparse`" in refusal(tmp_path)


# --- files that are something else ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"x" * 999, mtime=0), "a.tar: is compressed by gzip: unpack it"),
        (b"\x28\xb5\x2f\xfd" + bytes(99), "a.tar: is compressed by zstd: unpack it"),
        (b"BZh9" + bytes(99), "a.tar: is compressed by bzip2: unpack it"),
        (b"<!DOCTYPE html><html>", "a.tar: is a web page or an error message"),
        (b"\n<html>log in</html>", "a.tar: is a web page or an error message"),
        (b"<?xml version='1.0'?><Error>", "a.tar: is a web page or an error message"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "a.tar: is a pointer of Git LFS"),
    ],
)
def test_files_of_another_kind_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    assert message in (line := refusal(tmp_path)), line


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("b.tar.part", "b.tar.part is a file that was not downloaded completely: complete or remove it"),
        ("a.tar.aria2", "a.tar.aria2 is a file that was not downloaded completely"),
        ("b.parquet.crdownload", "is a file that was not downloaded completely"),
        ("b.tar.gz", "b.tar.gz is compressed: unpack it"),
        ("b.TAR.ZST", "b.TAR.ZST is compressed: unpack it"),
        ("b.txz", "b.txz is compressed: unpack it"),
        ("old.tar.bak", ""),
        ("c.tar.1", ""),
        ("a.tar.sha256", ""),
    ],
)
def test_files_beside_the_shards(tmp_path: Path, name: str, message: str) -> None:
    write_tar(tmp_path / "a.tar", FIRST)
    (tmp_path / name).write_bytes(b"x")
    if message:
        assert message in refusal(tmp_path)
    else:
        data = opened(tmp_path)
        assert len(data.train) == 8
        assert f"passed over 1 file (1 .{name.rpartition('.')[2]})" in data.about


def test_capitals_in_the_ending_of_a_shard(tmp_path: Path) -> None:
    write_tar(tmp_path / "A.TAR", FIRST)
    assert len(opened(tmp_path).train) == 8
    write_tar(tmp_path / "A.tar", FIRST)
    assert "would be the same images twice" in refusal(tmp_path)


@pytest.mark.parametrize("place", ["*.tar", "a-[01].tar", "a-{0..1}.tar", "a-0.tar"])
def test_a_pattern_of_files_is_no_folder(tmp_path: Path, place: str) -> None:
    write_tar(tmp_path / "a-0.tar", FIRST)
    wanted = "names several files: must be the folder" if place != "a-0.tar" else "is a file: must be its folder"
    assert wanted in refusal(tmp_path / place)


def test_a_long_name_does_not_make_all_names_long(tmp_path: Path) -> None:
    names = [f"b0/{'x' * 20_000}{end}.png" for end in "ab"]
    write_tar(tmp_path / "a.tar", {**FIRST, **dict.fromkeys(names, picture())})
    images = innermost_dataset(opened(tmp_path).train)
    assert images.names.dtype.itemsize <= shard_scan.LONGEST_NAME
    assert len({*images.names.tolist()}) == 10


def test_a_shard_that_goes_while_it_is_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "a.tar", FIRST)
    scan = shard_scan.scan_tar

    def scan_later(*arguments: Any) -> Any:
        path.unlink()
        return scan(*arguments)

    monkeypatch.setattr(shard_scan, "scan_tar", scan_later)
    assert f"{path}: is gone, and was there when the shards were listed" in refusal(tmp_path)


# --- the same size and time, other content ---


def test_other_labels_of_the_same_size_and_time_are_indexed_again(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    for text in (plain, lambda label: {"even": "odd", "odd": "even"}[label]):
        write_tar(path, {**FIRST, **by_parity(FIRST, "cls", text)})
        os.utime(path, (1, 1))
        assert labels(tmp_path)["b0/0.png"] == text("even")


def test_a_replaced_file_of_the_same_size_and_time_is_indexed_again(tmp_path: Path) -> None:
    """As rsync and DVC write: another file takes the name."""
    data, other = tmp_path / "data", tmp_path / "other"
    path = write_tar(data / "a.tar", {**FIRST, **by_parity(FIRST, "cls", plain)})
    write_tar(other / "a.tar", {**FIRST, **by_parity(FIRST, "cls", lambda label: label[::-1])})
    for each_path in (path, other / "a.tar"):
        os.utime(each_path, (1, 1))
    assert labels(data)["b0/0.png"] == "even"
    os.replace(other / "a.tar", path)
    assert labels(data)["b0/0.png"] == "neve"
    assert np.unique(innermost_dataset(opened(data).train).labels).tolist() == [0, 1]


def test_the_folder_of_the_shards_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the index is made, and in a run."""
    path = write_tar(tmp_path / "shards" / "a.tar", FIRST)
    part = opened(path.parent).train
    shutil.rmtree(path.parent)
    line = refusal_of(lambda: part[0])
    assert f"{path}: is gone, and was there when the shards were listed: put it back" in line, line
    write_tar(path, FIRST)
    build = shard_index.build

    def build_and_remove(*arguments: Any) -> None:
        shutil.rmtree(path.parent)
        build(*arguments)

    monkeypatch.setattr(shard_index, "build", build_and_remove)
    line = refusal(path.parent)
    assert "is gone" in line or "its folder was removed while it was written" in line, line


# --- parquet files ---


def parquet(path: Path, **columns: Any) -> Path:
    pa = pytest.importorskip("pyarrow", reason="pip install -e .[huggingface] brings pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), path)
    return path


PAIR = [picture(), picture(1)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"img": PAIR, "label": [0, 1]}, "no column image, its columns are img, label: choose by data.image= and data"),
        ({"image": PAIR, "y": [0, 1]}, "no column label, its columns are image, y: choose by data.image= and data.la"),
        ({"image": [picture(), None], "label": [0, 1]}, "row 1 has no image"),
        ({"image": [1, 2], "label": [0, 1]}, "row 0 has no image"),
        ({"image": [picture(), b"none"], "label": [0, 1]}, "image a.parquet:0000000001: repair or remove it"),
        ({"image": PAIR, "label": [0, None]}, "row 1 has the label None: its column label must hold"),
        ({"image": PAIR, "label": [0.5, 1.0]}, "row 0 has the label 0.5"),
        ({"image": PAIR, "label": [True, False]}, "row 0 has the label True"),
        ({"image": PAIR, "label": [[0], [1]]}, "row 0 has the label [0]"),
        ({"image": 2 * PAIR, "label": [0, 1, -1, 1]}, "the label -1 is how programs write none: leave such images out"),
    ],
)
def test_parquet_files_that_are_refused(tmp_path: Path, columns: dict[str, list[Any]], message: str) -> None:
    parquet(tmp_path / "a.parquet", **columns)
    line = refusal(tmp_path)
    assert message in line, line
    assert f"{tmp_path}/a.parquet: " in line or "-1" in message


def test_damaged_parquet_files_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install -e .[huggingface] brings pyarrow")
    file = tmp_path / "shards" / "a.parquet"
    whole = write_parquet(file, [*write_folder(tmp_path / "folder").rglob("*.png")]).read_bytes()
    for damaged, what in ((whole[:-9], "damaged parquet file ("), (whole[:40] + bytes(400) + whole[440:], "image ")):
        file.write_bytes(damaged)
        assert f"{file}: {what}" in (line := refusal(file.parent)), line
    file.write_bytes(whole)
    assert len(opened(file.parent).train) == 27


def test_parquet_without_pyarrow_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    assert "a.parquet: parquet files need pyarrow: pip install pyarrow" in refusal(tmp_path)


def test_minus_one_beside_one_is_a_class(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", image=[picture(n) for n in range(4)], label=[1, -1, 1, -1])
    assert opened(tmp_path).spec.classes == ("-1", "1")


def test_options_of_tar_files_are_refused_for_parquet_files(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", image=[picture(n) for n in range(2)], label=[0, 1])
    assert "data.image=['jpg', 'webp'] are endings of names in tar files" in refusal(tmp_path, image=["jpg", "webp"])
    assert "data.label=null is for folders in tar files" in refusal(tmp_path, label=None)
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert "a.parquet: is compressed by gzip: unpack it" in refusal(tmp_path)
