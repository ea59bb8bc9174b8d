"""Tar and parquet files of images: one order with folders, an index that is made once, and what is refused."""

import io
import shutil
import tarfile
import threading
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Program, Run
from PIL import Image
from small_data import refusal_of
from written_shards import opened, picture, same, samples, write_folder, write_shards, write_tar

from lockstep.data.datasets import innermost_dataset
from lockstep_streams import shard_index

PARQUET = "pip install -e .[huggingface] brings pyarrow, which parquet files need"
EXACT = (
    "scheduler=constant",
    "data.image_size=20",
    "batch_size=9",
    "pieces=3",
    "exact=true",
    "threads=1",
    "accelerator=cpu",
    "logger=none",
)


def refusal(folder: Path, **changes: Any) -> str:
    return refusal_of(opened, folder, **changes)


FORMS = ("tar", "webdataset", "parquet")


def written(folder: Path, root: Path, form: str, **options: Any) -> Path:
    if form == "parquet":
        pytest.importorskip("pyarrow", reason=PARQUET)
    return write_shards(folder, root, form, **options)


def test_a_folder_and_its_shards_train_the_same_weights(run_train: Program, tmp_path: Path) -> None:
    """The run on shards ends on two devices and is resumed on one. In the control, two images are exchanged."""

    def on_shards(name: str, *overrides: str) -> Run:
        data = f"data_dir={write_shards(folder, tmp_path / name, 'tar')}"
        return Program(tmp_path / "outputs" / name)("data=shards", data, *EXACT, *overrides)

    folder = write_folder(tmp_path / "images")
    weights = run_train("data=image_folder", f"data_dir={folder}", *EXACT, "max_steps=8").summary["weights_sha256"]
    cut = on_shards("same", "max_steps=3", "strategy=ddp", "devices=2")
    assert cut.summary["weights_sha256"] != weights
    run = Program(cut.outputs)("resume=last", "max_steps=8", "strategy=auto", "devices=1")
    assert (run.summary["steps"], run.summary["weights_sha256"]) == (8, weights)

    first, second = (folder / "train" / name / "1.png" for name in ("cat", "dog"))
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])
    assert on_shards("exchanged", "max_steps=8").summary["weights_sha256"] != weights


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("form", FORMS)
def test_the_order_is_that_of_the_folder_however_shards_are_cut(tmp_path: Path, form: str) -> None:
    folder = write_folder(tmp_path / "folder")
    shards, cut = (written(folder, tmp_path / f"{form}{n}", form, count=n, seed=n) for n in (2, 5))
    plain, one, other = opened(folder, "image_folder"), opened(shards), opened(cut)
    for part in ("train", "val", "test"):
        assert same(getattr(plain, part), getattr(one, part))
        assert same(getattr(one, part), getattr(other, part))
    assert one.fingerprint == other.fingerprint
    assert (one.fingerprint == plain.fingerprint) == (form == "tar")  # the other forms have other names or labels


def test_shards_without_parts_are_split_as_class_folders(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", (("train", 14),))
    shards = opened(write_shards(folder, tmp_path / "shards", "tar"), val_fraction=0.2, test_fraction=0.3)
    plain = opened(folder / "train", "image_folder", val_fraction=0.2, test_fraction=0.3)
    for part in ("train", "val", "test"):
        assert same(getattr(plain, part), getattr(shards, part))
    other = opened(tmp_path / "shards", val_fraction=0.2, test_fraction=0.3, split_seed=1)
    assert not same(shards.test, other.test)
    assert (len(shards.test), shards.split_by_opener) == (12, True)


def test_an_index_is_made_once_and_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_shards(write_folder(tmp_path / "folder"), tmp_path / "shards", "tar")
    first = opened(root)
    (index,) = (root / ".index").glob("shards-*")
    with monkeypatch.context() as patch:
        patch.setattr(shard_index, "build", lambda *arguments: pytest.fail("indexed again"))
        assert same(opened(root).train, first.train)
    images = innermost_dataset(first.train)
    for array in (images.names, images.labels, images.places):
        assert isinstance(array.base, np.memmap), "it would be in the memory of each process"
    shard = root / "train-00000.tar"
    write_tar(shard, {"cat/more.jpg": picture(form="JPEG")}, "a")
    line = refusal_of(samples, first.train)
    assert f"{shard}: changed after it was indexed: start again" in line
    again = opened(root)
    assert len(again.train) + len(again.val) == len(first.train) + len(first.val) + 1
    assert again.fingerprint != first.fingerprint
    assert [*(root / ".index").glob("shards-*")] != [index]
    assert len([*(root / ".index").glob("shards-*")]) == 1


def test_cached_arrays_keep_their_order(tmp_path: Path) -> None:
    """More than ten of them: `10.npy` comes before `2.npy` in the order of texts."""
    index = shard_index.Index(tmp_path, {}, [])
    for _ in range(2):  # computed, then read
        arrays = index.cached_arrays("numbers", lambda: [np.array([number]) for number in range(12)])
        assert np.concatenate(arrays).tolist() == list(range(12))


def test_an_index_is_elsewhere_if_the_folder_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_shards(write_folder(tmp_path / "folder"), tmp_path / "shards", "tar")
    (root / ".index").touch()  # root may write everywhere, so a file stands in the way
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(opened(root).train) == 38
    assert len([*(tmp_path / "cache" / "lockstep").glob("*/shards-*/index.json")]) == 1
    opened(root, index_dir=str(tmp_path / "mine"))
    opened(write_tar(tmp_path / "other" / "a.tar", GOOD).parent, index_dir=str(tmp_path / "mine"))
    assert len([*(tmp_path / "mine").glob("*/shards-*/index.json")]) == 2  # one of each folder of shards
    assert "data.index_dir=" in refusal(root, index_dir=str(root / "test-00000.tar"))


def _open_in_process(root: Path, begin: Any, results: Any) -> None:
    builds = []
    build = shard_index.build
    shard_index.build = lambda *arguments: (builds.append(1), build(*arguments))  # type: ignore[assignment, func-returns-value]
    begin.wait()
    results.put((opened(root).fingerprint, len(builds)))


@pytest.mark.usefixtures("processes")
def test_one_of_several_processes_makes_the_index(tmp_path: Path) -> None:
    root = write_shards(write_folder(tmp_path / "folder"), tmp_path / "shards", "tar")
    context = get_context("spawn")  # a fork of pytest would have the locks of its threads
    begin, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_open_in_process, args=(root, begin, results)) for _ in range(2)]
    for process in processes:
        process.start()
    actual = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    assert sum(builds for _, builds in actual) == 1
    assert len({fingerprint for fingerprint, _ in actual}) == 1
    assert not [*(root / ".index").glob(".new*")]


def test_threads_and_forks_read_the_same_images(tmp_path: Path) -> None:
    """A read has no position that others could move."""
    part = opened(write_shards(write_folder(tmp_path / "folder"), tmp_path / "shards", "tar")).train
    expected = samples(part)
    wrong: list[int] = []

    def read() -> None:
        wrong.extend(i for _ in range(3) for i in range(len(part)) if not torch.equal(part[i][0], expected[i][0]))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_classes_that_are_numbers_are_sorted_as_numbers(tmp_path: Path) -> None:
    for ending, texts in (("cls", ["10\n", "9"]), ("json", ['{"label": 20, "x": []}', '{"label": 3}'])):
        members = {f"{i}.{ending}": text.encode() for i, text in enumerate(texts)}
        write_tar(tmp_path / ending / "a.tar", {**members, "0.png": picture(), "1.png": picture(1)})
    assert opened(tmp_path / "cls").spec.classes == ("9", "10")
    assert opened(tmp_path / "json").spec.classes == ("3", "20")


def test_one_of_two_images_of_a_label_is_chosen(tmp_path: Path) -> None:
    kinds = ("seg.png", "in.png")
    members = {f"{number}.{kind}": picture(number) for number in range(2) for kind in kinds}
    write_tar(tmp_path / "a.tar", {**members, "0.cls": b"1", "1.cls": b"0"})
    assert "0.seg.png and 0.in.png have one label: choose one by data.image=" in refusal(tmp_path)
    images = opened(tmp_path, image="in.png")
    assert sorted(innermost_dataset(images.train).names.tolist()) == [b"0.in.png", b"1.in.png"]


def test_nothing_in_a_tar_leads_out_of_it(tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(picture(200))
    root = tmp_path / "shards"
    write_tar(root / "a.tar", {"cat/1.png": picture(), "dog/1.png": picture(1), "../../dog/2.png": picture(2)})
    with tarfile.open(root / "a.tar", "a") as tar:
        for kind, name in ((tarfile.SYMTYPE, "cat/link.png"), (tarfile.LNKTYPE, "cat/hard.png")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, str(secret)
            tar.addfile(info)
    before = sorted(path.name for path in tmp_path.iterdir())
    splits = opened(root, val_fraction=0, test_fraction=0)
    assert "passed over 2 files (2 links): known are jpg" in splits.about
    assert splits.spec.classes == ("..", "cat", "dog")  # a name is a name
    assert len(splits.train) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_other_images_and_thumbnails_in_a_tar_are_counted(tmp_path: Path) -> None:
    names = ("cat/3.webp", "dog/3.WEBP", "dog/4.avif", "cat/@eaDir/1.png/S.jpg", "__MACOSX/cat/1.png", "cat/._1.png")
    root = write_tar(tmp_path / "a.tar", {**GOOD, **dict.fromkeys(names, picture())}).parent
    for _ in range(2):  # made, then read
        splits = opened(root, val_fraction=0, test_fraction=0)
        assert (splits.spec.classes, len(splits.train)) == (("cat", "dog"), 4)
        assert "passed over 5 files (2 .webp, 1 .avif, 1 in @eaDir, 1 in __MACOSX): known are jpg" in splits.about


GOOD = {"cat/1.png": picture(), "cat/2.png": picture(1), "dog/1.png": picture(2), "dog/2.png": picture(3)}


@pytest.mark.parametrize("cut", ["data", "header", "border", "header flipped", "size"])
def test_a_damaged_tar_is_refused(tmp_path: Path, cut: str) -> None:
    """Also where tarfile takes the damage for the end."""
    path = write_tar(tmp_path / "shards" / "a.tar", GOOD)
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    content = bytearray(path.read_bytes())
    if cut == "header flipped":
        content[last.offset + 3] ^= 1
    if cut == "size":  # a negative one, in base 256, with a checksum that fits
        header = bytearray(content[last.offset : last.offset_data])
        header[124:136] = (-512 * 9).to_bytes(12, "big", signed=True)
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        content[last.offset : last.offset_data] = header
    stop = {"data": last.offset_data + 9, "header": last.offset + 99, "border": last.offset_data + 512}.get(cut)
    path.write_bytes(content[:stop])
    after = "dog/1.png" if "header" in cut else "dog/2.png"
    line = refusal(path.parent)
    assert "a.tar: truncated or damaged tar file (" in line
    assert f") after {'dog/1.png' if cut == 'size' else after}: it must be written or copied again" in line, line


def test_an_image_that_cannot_be_decoded_ends_a_run_in_one_line(tmp_path: Path) -> None:
    """Its header is good, so it is not known before."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(file, "PNG")
    root = write_tar(tmp_path / "shards" / "a.tar", {**GOOD, "dog/3.png": file.getvalue()[:150]}).parent
    splits = opened(root, val_fraction=0, test_fraction=0)
    line = refusal_of(samples, splits.train)
    assert f"{root / 'a.tar'}: image dog/3.png can't be decoded (" in line
    assert "skip_broken" not in line


def test_folders_of_shards_that_are_refused(tmp_path: Path) -> None:
    assert "is no folder: it must hold .tar or .parquet files" in refusal(tmp_path / "nowhere")
    assert "has no shards: it must hold .tar or .parquet files" in refusal(tmp_path)
    for name in ("a.tar.gz", "a.tgz"):
        (tmp_path / name).touch()
        assert f"{name} is compressed: unpack it" in refusal(tmp_path)
        (tmp_path / name).unlink()
    write_tar(tmp_path / "a.tar", GOOD)
    write_tar(tmp_path / "val" / "b.tar", {**GOOD, "eel/1.png": picture()})
    assert "a.tar is of no part, b.tar of one: all paths must name train, val or test, or none" in refusal(tmp_path)
    (tmp_path / "a.tar").rename(tmp_path / "test-1.tar")
    assert "has val and test, and no train" in refusal(tmp_path)
    (tmp_path / "test-1.tar").rename(tmp_path / "train-1.tar")
    assert "only val has the class eel: train must have it, too" in refusal(tmp_path)
    write_tar(tmp_path / "val" / "b.tar", {"1.cls": b"cat", "1.png": picture()})
    of_other = f"{tmp_path}/val/b.tar: its labels come from texts, those of {tmp_path}/train-1.tar from folders"
    assert of_other in refusal(tmp_path)
    write_tar(tmp_path / "val" / "b.tar", GOOD)
    assert len(opened(tmp_path).val) == 4
    assert opened(tmp_path).test is None


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    root = write_tar(tmp_path / "a.tar", GOOD).parent
    opened(root)
    (file,) = root.glob(".index/shards-*/index.json")
    file.write_text("{")
    assert "damaged index (Expecting" in refusal(root)
    shutil.rmtree(root / ".index")
    opened(root)
    (file,) = root.glob(".index/shards-*/*/labels.npy")
    np.save(file, np.array([{}]), allow_pickle=True)
    assert "damaged index (" in (line := refusal(root)), line  # nothing is unpickled
