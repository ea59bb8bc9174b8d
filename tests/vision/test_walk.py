"""Walks over users' folders: nothing is dropped without a word, and what can't be read is refused."""

import os
import shutil
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from small_data import refusal_of, write_images
from written_shards import write_tar

from lockstep.vision.data import ImageFiles, image_folder
from lockstep.vision.data.walk import walk
from lockstep_streams.shards import shards


def openers(root: Path) -> list[tuple[Any, ...]]:
    return [(image_folder, str(root)), (ImageFiles, root, 8, 3), (shards, str(root))]


def _lines_as_nobody(root: Path, results: Any) -> None:
    os.setgid(12345)
    os.setuid(12345)
    results.put([refusal_of(call, *arguments) for call, *arguments in openers(root)])


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can drop its rights")
def test_a_folder_without_rights_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:  # that of pytest is closed to other users
        root = write_images(Path(folder), (".",))
        (root / "cat" / "more").mkdir()
        shutil.copy(root / "cat" / "0.png", root / "cat" / "more" / "7.png")
        root.chmod(0o755)
        (root / "cat" / "more").chmod(0)
        context = get_context("fork")
        results = context.Queue()
        process = context.Process(target=_lines_as_nobody, args=(root, results))
        process.start()
        for line in results.get(timeout=30):
            assert f"{root / 'cat' / 'more'}: can't be read (Permission denied): its files would be missing" in line
        process.join()


@pytest.mark.parametrize("place", ["cat", "cat/more", "."])
def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: Any, place: str) -> None:
    write_images(tmp_path, (".",))
    (tmp_path / "cat" / "more").mkdir()
    scandir = os.scandir

    def failing(folder: Any) -> Any:
        if os.path.normpath(folder) == os.path.normpath(tmp_path / place):
            raise OSError(116, "Stale file handle", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", failing)
    for call, *arguments in openers(tmp_path):
        line = refusal_of(call, *arguments)
        assert f"{Path(tmp_path, place)}: can't be read (Stale file handle): its files would be missing" in line


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("a.png", "nowhere.png", "a.png: a link that can't be followed (No such file or directory): repair or remove"),
        ("more", "nowhere", "more: a link that can't be followed (No such file or directory)"),
        ("a.png", "a.png", "a.png: a link that can't be followed (Too many levels of symbolic links)"),
    ],
)
def test_links_that_lead_nowhere_are_refused(tmp_path: Path, name: str, target: str, message: str) -> None:
    write_images(tmp_path, (".",))
    (tmp_path / "cat" / f".{name}").symlink_to("hidden")  # the control: editors lock files so
    assert len(ImageFiles(tmp_path, 8, 3)) == 12
    (tmp_path / "cat" / name).symlink_to(target)
    for call, *arguments in openers(tmp_path):
        assert message in refusal_of(call, *arguments)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path, (".",))
    os.mkfifo(tmp_path / "cat" / "a.png")
    assert "a.png: no regular file" in refusal_of(image_folder, str(tmp_path))


def test_what_is_passed_over_is_counted(tmp_path: Path) -> None:
    write_images(tmp_path)
    cat = tmp_path / "train" / "cat"
    for name in ("a.avif", "b.AVIF", "c.jp2", "README", "._0.png", ".DS_Store", "Thumbs.db"):
        (cat / name).touch()
    (tmp_path / "train" / "stray.png").touch()
    (tmp_path / "more").mkdir()
    text = image_folder(str(tmp_path)).about
    assert "; passed over 7 files (2 .avif, " in text
    for part in (
        "1 .jp2",
        "1 without an ending",
        "1 hidden",
        "1 .db",
        "1 beside the folders",
        "and 1 folder (1 more/)",
    ):
        assert part in text, text
    assert "known are .jpg" in text
    files = ImageFiles(tmp_path / "train", 8, 3)
    assert "passed over 6 files (2 .avif" in files.about


def test_nothing_is_reported_where_nothing_is_passed_over(tmp_path: Path) -> None:
    assert "passed over" not in image_folder(str(write_images(tmp_path))).about


def test_jfif_is_read(tmp_path: Path) -> None:
    write_images(tmp_path)
    Image.new("RGB", (8, 8)).save(tmp_path / "test" / "cat" / "a.JFIF", "JPEG")
    assert len(image_folder(str(tmp_path)).test) == 13


RUBBISH = ("@eaDir", "$RECYCLE.BIN", "__MACOSX", "lost+found", ".Trash-1000", "#recycle", "System Volume Information")


@pytest.mark.parametrize("name", [*RUBBISH, ".thumbnails", "@EADIR"])
def test_folders_of_thumbnails_and_bins_are_passed_over(tmp_path: Path, name: str) -> None:
    write_images(tmp_path, (".",))
    for place in ("", "cat", "cat/more"):
        folder = tmp_path / place / name / "0.png"
        folder.mkdir(parents=True)
        shutil.copy(tmp_path / "dog" / "0.png", folder / "SYNOPHOTO_THUMB_M.png")
        write_tar(folder / "a.tar", {"cat/1.png": b""})
    source = image_folder(str(tmp_path))
    assert (source.spec.classes, len(source.train) + len(source.val) + len(source.test)) == (("cat", "dog"), 12)
    assert f"3 folders (3 {name}/)" in source.about
    files = ImageFiles(tmp_path, 8, 3)
    assert len(files) == 12
    assert f"3 folders (3 {name}/)" in files.about
    assert "has no shards" in refusal_of(shards, str(tmp_path))


def test_paths_are_sorted_at_any_depth(tmp_path: Path) -> None:
    for name in ("b/1", "b/a/2", "a", "b.c", "b-c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    actual = walk(tmp_path, lambda name: True)
    assert actual.paths == sorted(["b/1", "b/a/2", "a", "b.c", "b-c"])
    assert actual.inodes == [os.stat(tmp_path / name).st_ino for name in actual.paths]
    assert walk(tmp_path, lambda name: True, "b").paths == ["b/1", "b/a/2"]
