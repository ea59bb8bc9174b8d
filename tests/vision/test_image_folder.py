"""Folders of images: read, and refused where something is wrong with them."""

import itertools
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import Program
from PIL import Image
from small_data import config, refusal_of, write_images

from lockstep.data.build import open_data
from lockstep.data.datasets import fetch
from lockstep.errors import UserError
from lockstep.report.report_lines import images_lines
from lockstep.vision.data import ImageFiles, image_folder, image_list, labelled
from lockstep.vision.data.folders import open_classes
from lockstep.vision.data.labelled import decode
from lockstep.vision.data.options import ImageOptions


def test_image_folder(tmp_path: Path) -> None:
    actual = open_data(config("image_folder", image_size=8, val_fraction=0.25), str(write_images(tmp_path)))
    assert (len(actual.train), len(actual.val), len(actual.test)) == (9, 3, 12)
    assert actual.spec.classes == ("cat", "dog")
    images, labels = fetch(actual.test, np.arange(12))
    assert (images.dtype, images.shape) == (torch.uint8, (12, 3, 8, 8))
    assert labels.tolist() == [0] * 6 + [1] * 6
    grey = open_data(config("image_folder", channels=1), str(tmp_path))
    assert fetch(grey.test, np.arange(2))[0].shape == (2, 1, 14, 14)
    write_images(tmp_path, ("val",), each=2)
    assert (len(open_data(config("image_folder"), str(tmp_path)).val)) == 4


LAYOUTS = {
    ("train", "val", "test"): ((12, 12, 12), "train/, val/, test/ in"),
    ("train", "test"): ((9, 3, 12), "train/, test/ in .*; a part of train/ is used for validation"),
    ("train", "val"): ((12, 12, None), "train/, val/ in .*; nothing is tested"),
    (".",): ((6, 4, 2), "a folder per class in .*; split by"),
}


@pytest.mark.parametrize("parts", LAYOUTS)
def test_folders_as_people_have_them(tmp_path: Path, parts: tuple[str, ...]) -> None:
    write_images(tmp_path, parts)
    (tmp_path / "README.txt").write_text("not an image")
    actual = open_data(config("image_folder", val_fraction=0.25, test_fraction=0.2), str(tmp_path))
    sizes, message = LAYOUTS[parts]
    assert tuple(None if part is None else len(part) for part in (actual.train, actual.val, actual.test)) == sizes
    assert re.match(f"image_folder: {message}", actual.about)


def names(files: Any) -> set[str]:
    return set(files.names.tolist())


def test_a_flat_folder_is_split_by_class_and_name(tmp_path: Path) -> None:
    write_images(tmp_path, (".",), each=40)

    def opened(**changes: Any) -> Any:
        return image_folder(str(tmp_path), val_fraction=0.1, test_fraction=0.2, **changes)

    actual = opened()
    parts = [actual.train, actual.val, actual.test]
    assert [np.bincount(part.labels).tolist() for part in parts] == [[28, 28], [4, 4], [8, 8]]
    assert len(set.union(*map(names, parts))) == 80
    assert names(opened().test) == names(actual.test)
    assert names(opened(split_seed=1).test) != names(actual.test)
    for number in range(40, 44):  # what is added later moves hardly another
        shutil.copy(tmp_path / "cat" / "0.png", tmp_path / "cat" / f"{number}.png")
    assert len(names(opened().test) & names(actual.test)) >= 13
    assert ImageOptions().split(actual.train.part(np.arange(2)))[1:] == [None, None]


@pytest.mark.parametrize(("val", "test"), [(0.1, 0.5), (0.05, 0.9), (0.9, 0.05), (0.3, 0.3)])
def test_a_class_of_three_files_has_one_in_each_part(tmp_path: Path, val: float, test: float) -> None:
    write_images(tmp_path, (".",), each=3)
    options = ImageOptions(8, val_fraction=val, test_fraction=test)
    files, _, _ = open_classes(tmp_path, options)
    parts = options.split(files)
    assert [np.bincount(part.labels).tolist() for part in parts if part] == [[1, 1]] * 3
    assert names(replace(options, val_fraction=0.0).split(files)[2]) == names(parts[2]), "val_fraction changed the test"


def test_transforms_get_files_whole(tmp_path: Path) -> None:
    write_images(tmp_path)
    for number, mode in enumerate(("L", "I;16", "RGBA", "P", "1")):  # of other kinds and sizes
        image = Image.new(mode.replace(";16", "") if mode == "P" else mode, (30 + number, 11))
        image.save(tmp_path / "train" / "cat" / f"{mode[0]}.png")
    crop = {"_target_": "torchvision.transforms.v2.RandomResizedCrop", "size": "later:image_size"}
    actual = open_data(config("image_folder", image_size=8, transforms={"train": [crop]}), str(tmp_path))
    images, _ = fetch(actual.train, np.arange(len(actual.train)))
    assert (images.dtype, images.shape[1:]) == (torch.uint8, (3, 8, 8))
    assert actual.test.whole(0)[0].shape == (3, 20, 14)
    plain = open_data(config("image_folder", image_size=8), str(tmp_path))
    assert torch.equal(fetch(actual.val, np.arange(1))[0], fetch(plain.val, np.arange(1))[0])
    flip = {"_target_": "torchvision.transforms.v2.RandomHorizontalFlip"}
    with pytest.raises(UserError, match="they must have one size; use RandomResizedCrop"):
        open_data(config("image_folder", transforms={"train": [flip]}), str(tmp_path))


def test_a_folder_that_links_lead_to_again_counts_once(tmp_path: Path) -> None:
    root = write_images(tmp_path / "data")
    cat = root / "train" / "cat"
    cat.rename(tmp_path / "elsewhere")
    cat.symlink_to(tmp_path / "elsewhere")
    (cat / "again").symlink_to(tmp_path / "elsewhere")
    (cat / "more").mkdir()
    (cat / "0.png").rename(cat / "more" / "0.png")
    (cat / "less").symlink_to("more")
    names = open_classes(root / "train", ImageOptions(8))[0].names.tolist()
    assert names[:6] == ["cat/1.png", "cat/2.png", "cat/3.png", "cat/4.png", "cat/5.png", "cat/less/0.png"]
    assert len(names) == 12


def spoil(root: Path, how: str) -> None:
    cat = root / "train" / "cat"
    if how == "empty class":
        for file in cat.iterdir():
            file.rename(file.with_suffix(".txt"))
    elif how == "no classes":
        (root / "test").rename(root / "other")
        (root / "test").mkdir()
    elif how == "no test":
        (root / "test").rename(root / "other")
    elif how == "no train":
        (root / "train").rename(root / "other")
    elif how == "too deep":
        for part in ("train", "test"):
            (root / part).rename(root / "images")
            (root / part).mkdir()
            (root / "images").rename(root / part / "images")
    elif how == "spelled otherwise":
        (root / "test").rename(root / "Testing")
    elif how == "no UTF-8":
        os.rename(os.fsencode(cat), os.fsencode(cat.parent) + b"/caf\xe9")
    elif how == "other classes":
        cat.rename(cat.with_name("lion"))
    elif how == "unreadable":
        (cat / "3.png").write_bytes(b"not an image")
        (cat / "4.png").write_bytes(b"")
    elif how == "deep":
        Image.fromarray(np.full((20, 14), 0.5, dtype=np.float32)).save(cat / "6.tiff")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("empty class", ["no image in", "train/cat"]),
        ("no classes", ["test has no folders"]),
        ("no test", ["has train/ and neither test/ nor val/", "train to split it"]),
        ("no train", ["has test/ and no train/"]),
        ("too deep", ["train has only one folder, images: it must have a folder for each class"]),
        ("spelled otherwise", ["has a folder Testing, which is no class: rename it to one of train, val, test"]),
        ("no UTF-8", ["train has a folder whose name is not UTF-8, b'caf\\xe9': rename it"]),
        ("other classes", ["same classes", "only test/ has cat"]),
        ("unreadable", ["2 of 24 image files", "cat/3.png", "cat/4.png: repair or remove them, or data.skip"]),
        ("deep", ["1 of 25 image files", "6.tiff (32 bits per channel: save it with 8 bits per channel): repair or"]),
    ],
)
def test_image_folders_that_are_refused(tmp_path: Path, how: str, words: list[str]) -> None:
    spoil(write_images(tmp_path), how)
    line = refusal_of(image_folder, str(tmp_path))
    assert all(word in line for word in words), line


def test_broken_images_are_listed_or_skipped(tmp_path: Path) -> None:
    """Seven whose header or tail is broken: the others are what they would be without these."""
    for part in ("train", "test"):
        write_images(tmp_path / "broken", (part,), each=20)
    clean = shutil.copytree(tmp_path / "broken", tmp_path / "clean")
    rows = []
    for number in range(7):
        file = tmp_path / "broken" / "train" / "cat" / f"{number}.png"
        file.write_bytes(b"" if number < 6 else file.read_bytes()[:-60])
        (clean / "train" / "cat" / file.name).unlink()
    for folder in (tmp_path / "broken", clean):
        rows = [f"{file.relative_to(folder)},{file.parent.name}" for file in sorted(folder.rglob("*.png"))]
        (folder / "list.csv").write_text("\n".join(["path,label", *rows]))
    for name, listed in (("image_folder", {}), ("image_list", {"csv": str(tmp_path / "broken" / "list.csv")})):
        output = refusal_of(open_data, config(name, **listed), str(tmp_path / "broken"))
        assert "6 of 80 image files" in output
        assert "cat/4.png and 1 more: repair or remove them, or data.skip_broken=true" in output
        actual = open_data(config(name, **listed, skip_broken=True), str(tmp_path / "broken"))
        assert "7 files that can't be decoded left out: " in actual.about
        assert "cat/4.png and 2 more" in actual.about
        csv = {"csv": str(clean / "list.csv")} if listed else {}
        assert actual.fingerprint == open_data(config(name, **csv), str(clean)).fingerprint
    for file in (tmp_path / "broken" / "train" / "cat").iterdir():
        file.write_bytes(b"")
    with pytest.raises(UserError, match=r"no image in .*train/cat can be decoded"):
        open_data(config("image_folder", skip_broken=True), str(tmp_path / "broken"))


def test_the_check_of_images_reaches_every_part_before_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path, ("train", "val"), each=10)
    (tmp_path / "val" / "cat" / "0.png").write_bytes(b"")
    clock = itertools.count()  # each look at the clock takes a second
    monkeypatch.setattr(labelled, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(labelled, "CHECK_SECONDS", 3.0)
    with pytest.raises(UserError, match=r"1 of 4 image files .*val/cat/0.png"):
        image_folder(str(tmp_path))


def test_moments_are_imagenets_or_set(tmp_path: Path) -> None:
    write_images(tmp_path)
    usual, custom = image_folder(str(tmp_path)).spec, image_folder(str(tmp_path), mean=[0, 0, 0], std=[1, 2, 3]).spec
    assert (usual.mean[0], usual.std[0]) == (0.485, 0.229)
    assert (custom.mean, custom.std) == ((0.0, 0.0, 0.0), (1.0, 2.0, 3.0))


def test_missing_image_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data_dir=.*nowhere is no folder"):
        image_folder(str(tmp_path / "nowhere"))


def test_image_that_breaks_later_is_named(tmp_path: Path) -> None:
    dataset = open_classes(write_images(tmp_path) / "train", ImageOptions(8))[0]
    whole = dataset.path(4).read_bytes()
    dataset.path(4).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cat/4\.png can't be decoded"):
        dataset[4]


@pytest.mark.parametrize("kind", ["jpg", "png", "tiff", "webp", "gif"])
def test_images_stand_upright(tmp_path: Path, kind: str) -> None:
    """As a camera says by EXIF's orientation; of a GIF, which has none, the first picture."""
    pixels = np.zeros((16, 24, 3), dtype=np.uint8)
    pixels[:, 12:] = 255
    turned = Image.fromarray(pixels if kind == "gif" else np.rot90(pixels, 1))  # to be turned back, clockwise
    exif = Image.Exif()
    exif[0x0112] = 6
    for part in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / part).mkdir(parents=True)
        more = {"save_all": True, "append_images": [turned.rotate(180)]} if kind == "gif" else {"exif": exif}
        turned.save(tmp_path / part / f"{1}.{kind}", **more)
    (tmp_path / "list.csv").write_text(f"path,label,split\ntrain/a/1.{kind},a,train\ntest/b/1.{kind},b,train\n")
    listed = image_list(str(tmp_path / "list.csv"), image_size=16, val_fraction=0)
    for files in (image_folder(str(tmp_path), image_size=16).train, listed.train, ImageFiles(tmp_path, 16, 3)):
        assert files.whole(0)[0].shape == (3, 16, 24)
        image = files[0][0]
        assert int(image[:, :, :6].max()) < 60 < 190 < int(image[:, :, 10:].min())


@pytest.mark.parametrize(("name", "type"), [("1.png", "<u2"), ("1.tiff", "<u2"), ("1.tiff", ">u2"), ("1.pgm", "<u2")])
def test_16_bits_are_scaled_to_8(tmp_path: Path, name: str, type: str) -> None:
    pixels = np.array([[0, 128, 129, 256], [257, 385, 386, 30000]] * 2).T.astype(type)
    Image.fromarray(pixels).save(tmp_path / name)
    for mode in ("L", "RGB"):
        for plane in decode(tmp_path / name, 4, mode):
            assert plane.tolist() == np.round(pixels / 257).tolist()


@pytest.mark.parametrize("how", ["hard", "symbolic"])
def test_a_file_with_two_links_counts_once_or_is_refused(tmp_path: Path, how: str) -> None:
    def link(part: str, name: str) -> Path:
        made = tmp_path / part / name / "link.png"
        first = tmp_path / "train" / "cat" / "0.png"
        if how == "hard":
            made.hardlink_to(first)
        else:
            made.symlink_to(first)
        return made

    write_images(tmp_path, ("train", "val", "test"))
    before = image_folder(str(tmp_path))
    made = link("train", "cat")
    source = image_folder(str(tmp_path))
    assert source.train.fingerprint() == before.train.fingerprint()
    assert f"1 image listed again, with the same label, counted once: {made}" in source.about
    made.unlink()
    for part, name, message in (
        ("train", "dog", "with cat and with dog: it must have one label"),
        ("test", "cat", "in train/ and in test/: it must be in one part"),
        ("val", "dog", "in train/ and in val/: it must be in one part"),
    ):
        made = link(part, name)
        line = refusal_of(image_folder, str(tmp_path))
        assert f"{tmp_path}/train/cat/0.png and {made} are the same image, {message}" in line
        made.unlink()
    assert image_folder(str(tmp_path)).about == before.about


def test_without_validation_nothing_is_reported_of_one(tmp_path: Path) -> None:
    write_images(tmp_path)
    for fraction, message in ((0.1, True), (0, False), (0.0, False)):
        assert ("used for validation" in image_folder(str(tmp_path), val_fraction=fraction).about) == message


def write_sized(root: Path, *sizes: tuple[int, int]) -> Path:
    """Write class folders with images of these widths and heights in turn."""
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", sizes[number % len(sizes)]).save(root / name / f"{number}.png")
    return root


@pytest.mark.parametrize(
    ("sizes", "options", "size", "lines"),
    [
        ([(320, 240)], {}, 224, ["images 224 x 224, from files of 320 x 240 "]),
        ([(36, 28)], {}, 28, ["images 28 x 28, from files of 36 x 28 "]),
        ([(20, 96), (700, 900), (96, 97)], {}, 96, ["images 96 x 96, from files of 20 x 96 to 700 x 900 "]),
        ([(900, 1200)], {}, 224, ["images 224 x 224, ", "of a file of 900 x 1200 only 4.6% of the pixels are left: "]),
        (
            [(300, 12)],
            {},
            12,
            [
                "images 12 x 12, ",
                "of a file of 300 x 12 only 4.0% of the pixels are left: the square in its middle; cut",
            ],
        ),
        (
            [(320, 240)],
            {"image_size": 32},
            32,
            ["images 32", "of a file of 320 x 240 only 1.3% of the pixels "],
        ),
        ([(64, 64)], {"image_size": 128}, 128, ["images 128 x 128, "]),
    ],
)
def test_the_size_follows_from_the_files_and_is_printed(
    sizes: list[tuple[int, int]], options: dict[str, int], size: int, lines: list[str], tmp_path: Path
) -> None:
    actual = open_data(config("image_folder", **options), str(write_sized(tmp_path, *sizes)))
    assert actual.spec.image_size == size
    shapes = {fetch(part, np.arange(1))[0].shape for part in (actual.train, actual.val, actual.test)}
    assert shapes == {(1, 3, size, size)}
    printed = images_lines(actual)
    assert [line.startswith(start) for line, start in zip(printed, lines, strict=True)] == [True] * len(lines)
    remedy = "data.augment.flip=false if left and right differ, as in digits or letters"
    assert printed[0].endswith(f"; crop=4 flip=true: {remedy}")
    plain = open_data(config("image_folder", **options, augment={"crop": 0, "flip": False}), str(tmp_path))
    assert images_lines(plain)[0].endswith("; crop=0 flip=false")


def test_a_chosen_size_is_recorded_and_holds_for_other_images(run_train: Program, tmp_path: Path) -> None:
    small, large = write_sized(tmp_path / "small", (18, 16)), write_sized(tmp_path / "large", (90, 80))
    options = ("data=image_folder", f"data_dir={small}", "batch_size=8", "max_steps=2", "logger=none")
    run = Program(tmp_path / "first")(*options)
    assert "images 16 x 16, from files of 18 x 16" in run.stderr
    assert yaml.safe_load((run.folder / ".hydra" / "config.yaml").read_text())["data"]["image_size"] == 16
    assert run_train(*options, "data.image_size=16").summary["weights_sha256"] == run.summary["weights_sha256"]
    resumed = Program(tmp_path / "first")(f"resume={run.folder}", "max_steps=3")
    assert "changed since the checkpoint: max_steps: 2 -> 3" in resumed.stderr
    (tmp_path / "list.csv").write_text(
        "path,label\n" + "".join(f"{path},{path.parent.name}\n" for path in sorted(large.rglob("*.png")))
    )
    for place, data in (("a", [f"data_dir={large}"]), ("b", ["+data=image_list", f"data.csv={tmp_path / 'list.csv'}"])):
        tested = Program(tmp_path / place, "src/evaluate.py")(f"checkpoint={run.folder}", *data, "split=all")
        assert tested.summary["metrics"]["test/count"] == 24
