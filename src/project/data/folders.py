"""Folders of images, with a folder for each class, as people have them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.arithmetic.layout import Refusal
from lockstep.loading.datasets import Source
from project.data.image_folder import EXTENSIONS, images_in
from project.data.labelled import PARTS, LabelledFiles, check_headers, image_spec, split

OTHERWISE = {"train", "training", "val", "valid", "validation", "test", "testing"}  # that are hardly classes
WANTED = "hold train/ with test/ or val/ or both, and in each a folder of images per class; or these folders alone"


def image_folder(
    data_dir: str,
    image_size: int = 32,
    channels: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    split_seed: int = 0,
) -> Source:
    """Images under `<data_dir>/train/<class>/`, and `test/` or `val/` or both beside it; without `test/` nothing is
    tested. Or all of them under `<data_dir>/<class>/`: these are split.

    Args:
        image_size: pixels; images are resized and cropped to it.
        channels: 3 (RGB) or 1 (grey).
        mean: per channel, of pixels in 0..1; None: ImageNet's.
        std: likewise.
        val_fraction: share of each class that is held out for validation, where all are split.
        test_fraction: likewise, for the test.
        split_seed: which ones.

    Raises:
        Refusal: folders or images that are missing, differ in their classes, or can't be read.
    """
    image_spec(image_size, channels, mean, std, ())  # bad options first
    root = Path(data_dir)
    if not root.is_dir():
        raise Refusal(f"image_folder: data_dir={data_dir} is no folder; it should {WANTED}")
    there = [name for name in PARTS if (root / name).is_dir()]
    doubtful = sorted({e.name for e in os.scandir(root) if e.is_dir() and e.name.lower() in OTHERWISE} - set(PARTS))
    if doubtful:
        raise Refusal(f"image_folder: {root} has a folder {doubtful[0]}: is it one of {', '.join(PARTS)}? Rename it")
    if there and ("train" not in there or len(there) == 1):
        lacks = "train/" if "train" not in there else "neither test/ nor val/"
        alone = f"; data_dir={root / 'train'} would split it" if there == ["train"] else ""
        raise Refusal(f"image_folder: {root} has {there[0]}/ and {'no ' * (lacks == 'train/')}{lacks}{alone}")
    found = {name: class_folders(root / name, image_size, channels) for name in there or [""]}
    files, classes = found[there[0] if there else ""]
    if len(classes) < 2:
        only = f"{root / there[0] if there else root} has only one folder, {classes[0]}"
        raise Refusal(f"image_folder: {only}; one per class is expected there, two at least")
    for name, (_, others) in found.items():
        if differing := sorted(set(classes) ^ set(others)):
            odd = f"only {'train' if differing[0] in classes else name}/ has {differing[0]}"
            raise Refusal(f"image_folder: train/ and {name}/ in {root} must have the same classes; {odd}")
    check_headers([part for part, _ in found.values()])
    if there:
        train, val, test = (found[name][0] if name in found else None for name in PARTS)
        what = "nothing is tested" if test is None else "a part of train/ validates" if val is None else ""
    else:
        train, val, test = split(files, val_fraction, test_fraction, split_seed)
        what = "split by data.val_fraction, data.test_fraction and data.split_seed"
    layout = ", ".join(f"{name}/" for name in there) or "a folder per class"
    about = f"image_folder: {layout} in {root}{what and f'; {what}'}"
    return Source(train, test, image_spec(image_size, channels, mean, std, classes), val, about=about)


def class_folders(root: Path, image_size: int, channels: int) -> tuple[LabelledFiles, list[str]]:
    """The images of the class folders in `root`, at any depth below, and the classes.

    Raises:
        Refusal: no class folders, one without an image, or one whose name is not UTF-8.
    """
    classes = sorted(e.name for e in os.scandir(root) if e.is_dir() and not e.name.startswith("."))
    if not classes:
        raise Refusal(f"image_folder: {root} has no folders; it should {WANTED}")
    for name in map(os.fsencode, classes):
        if name.decode(errors="replace").encode() != name:
            raise Refusal(f"image_folder: {root} has a folder whose name is not UTF-8, {name!r}: rename it")
    found = [images_in(root, name) for name in classes]
    empty = [name for name, names in zip(classes, found, strict=True) if not names]
    if empty:
        raise Refusal(f"image_folder: no image in {root / empty[0]}; known: {', '.join(EXTENSIONS)}")
    labels = np.repeat(np.arange(len(found)), [len(names) for names in found])
    return LabelledFiles(root, [name for names in found for name in names], labels, image_size, channels), classes
