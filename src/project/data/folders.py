"""Open image files: a folder for each class, or images without labels to be predicted."""

import csv
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep import Source, UserError
from project.data.labelled import MODES, PARTS, LabelledFiles, check_headers, decodable, image_spec, split, split_text

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
OTHERWISE = {"train", "training", "val", "valid", "validation", "test", "testing"}  # hardly names of classes
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
    skip_broken: bool = False,
) -> Source:
    """Open images that are sorted into a folder for each class.

    Either `<data_dir>` has `train/<class>/`, and `test/<class>/` or `val/<class>/` or both; without `test/` nothing is
    tested. Or it has `<class>/` alone, and the images are split. conf/data/image_folder.yaml describes the options.

    Raises:
        UserError: Folders or images are missing or can't be read, or the folders' classes differ.
    """
    image_spec(image_size, channels, mean, std, ())  # refuse bad options first
    if not isinstance(skip_broken, bool):
        raise ValueError(f"skip_broken={skip_broken}: must be true or false")
    root = Path(data_dir)
    if not root.is_dir():
        raise UserError(f"image_folder: data_dir={data_dir} is no folder: it must {WANTED}")
    parts = [name for name in PARTS if (root / name).is_dir()]
    doubtful = sorted({e.name for e in os.scandir(root) if e.is_dir() and e.name.lower() in OTHERWISE} - set(PARTS))
    if doubtful:
        rename = f"rename it to one of {', '.join(PARTS)}"
        raise UserError(f"image_folder: {root} has a folder {doubtful[0]}, which is no class: {rename}")
    if parts and ("train" not in parts or len(parts) == 1):
        lacks = "train/" if "train" not in parts else "neither test/ nor val/"
        alone = f": use data_dir={root / 'train'} to split it" if parts == ["train"] else ""
        raise UserError(f"image_folder: {root} has {parts[0]}/ and {'no ' * (lacks == 'train/')}{lacks}{alone}")
    opened = {name: class_folders(root / name, image_size, channels) for name in parts or [""]}
    files, classes = opened[parts[0] if parts else ""]
    if len(classes) < 2:
        only = f"{root / parts[0] if parts else root} has only one folder, {classes[0]}"
        raise UserError(f"image_folder: {only}: it must have a folder for each class, two at least")
    for name, (_, others) in opened.items():
        if differing := sorted(set(classes) ^ set(others)):
            odd = f"only {'train' if differing[0] in classes else name}/ has {differing[0]}"
            raise UserError(f"image_folder: train/ and {name}/ in {root} must have the same classes; {odd}")
    left_out = ""
    if skip_broken:
        ids, left_out = decodable([part for part, _ in opened.values()])
        opened = {name: (part.part(good), classes) for (name, (part, _)), good in zip(opened.items(), ids, strict=True)}
        for name, (part, _) in opened.items():
            if empty := sorted(set(range(len(classes))) - set(part.labels.tolist())):
                where = root / name / classes[empty[0]]
                raise UserError(f"image_folder: no image in {where} can be decoded: repair one, or remove the folder")
        files = opened[parts[0] if parts else ""][0]
    else:
        check_headers([part for part, _ in opened.values()])
    if parts:
        train, val, test = (opened[name][0] if name in opened else None for name in PARTS)
        what = "nothing is tested" if test is None else "a part of train/ is used for validation" if val is None else ""
    else:
        train, val, test = split(files, val_fraction, test_fraction, split_seed)
        what = split_text(val_fraction)
    layout = ", ".join(f"{name}/" for name in parts) or "a folder per class"
    about = f"image_folder: {'; '.join(filter(None, [f'{layout} in {root}', what, left_out]))}"
    spec = image_spec(image_size, channels, mean, std, classes)
    return Source(train, test, spec, val, about=about, split_by_opener=not parts)


def class_folders(root: Path, image_size: int, channels: int) -> tuple[LabelledFiles, list[str]]:
    """Return the images of the class folders in `root`, at any depth, and the names of the classes.

    Raises:
        UserError: There is no class folder, or one has no image or a name that is not UTF-8.
    """
    classes = sorted(e.name for e in os.scandir(root) if e.is_dir() and not e.name.startswith("."))
    if not classes:
        raise UserError(f"image_folder: {root} has no folders: it must {WANTED}")
    for name in map(os.fsencode, classes):
        if name.decode(errors="replace").encode() != name:
            raise UserError(f"image_folder: {root} has a folder whose name is not UTF-8, {name!r}: rename it")
    image_names = [images_in(root, name) for name in classes]
    empty = [name for name, names in zip(classes, image_names, strict=True) if not names]
    if empty:
        raise UserError(f"image_folder: no image in {root / empty[0]}: known are {', '.join(EXTENSIONS)}")
    labels = np.repeat(np.arange(len(image_names)), [len(names) for names in image_names])
    return LabelledFiles(root, np.array([*chain(*image_names)]), labels, image_size, channels), classes


def images_in(root: Path, name: str) -> list[str]:
    """Return the paths of a class's images, relative to `root` and sorted. A folder with several links counts once."""
    paths, seen = [], set()
    for folder, folders, files in os.walk(root / name, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        # sorted, so that every machine follows the same one of two links to a folder
        images = (file for file in files if file.lower().endswith(EXTENSIONS) and not file.startswith("."))
        paths += [os.path.relpath(os.path.join(folder, file), root) for file in images]
    return sorted(paths)


class ImageFiles(LabelledFiles):
    """Images without labels. An item is `(image, its number)`. The images of a folder are sorted.

    An image that can't be decoded is black and has the number -1, so it has no row among the predictions.

    Args:
        images: a folder, with images at any depth; a file; a list of paths, .txt (one a line) or .csv (in the column
            `file` or `path`, else the first); or several of these.
        image_size: pixels.
        channels: 1 or 3.

    Raises:
        UserError: A path does not exist, there is no image, none can be decoded, or `channels` is not 1 or 3.
    """

    uses_random_numbers = False

    def __init__(self, images: str | Path | Sequence[str], image_size: int, channels: int) -> None:
        if channels not in MODES:
            raise UserError(f"images={images}: files have 1 or 3 channels, but the model was trained on {channels}")
        sources = [images] if isinstance(images, str | Path) else images
        parts = [Path(str(each)).expanduser() for each in sources]
        alone = len(parts) == 1 and parts[0].is_dir()  # then names are relative to this folder
        names = images_in(parts[0], ".") if alone else [*chain(*map(_paths, parts))]
        if not names:
            raise UserError(f"images={images}: no image in it: known are {', '.join(EXTENSIONS)}")
        root = parts[0] if alone else Path()
        super().__init__(root, np.array(names), np.arange(len(names)), image_size, channels)
        if all(self[index][1] < 0 for index in range(len(self))):  # stops at the first that can be decoded
            raise UserError(f"images={images}: no image can be decoded, {names[0]} for example")

    def decoded(self, index: int, image_size: int | None) -> tuple[Tensor, Any]:
        try:
            return super().decoded(index, image_size)
        except UserError:
            return torch.zeros(self.channels, self.image_size, self.image_size, dtype=torch.uint8), -1


def _paths(source: Path) -> list[str]:
    """Return the image files that a path stands for. Paths in a list are relative to its folder."""
    if source.is_dir():
        return [str(source / name) for name in images_in(source, ".")]
    if not source.is_file():
        raise UserError(f"images={source}: no such file or folder")
    kind = source.suffix.lower()
    if kind not in (".txt", ".csv"):
        return [str(source)]
    lines = source.read_text("utf-8-sig", errors="surrogateescape").splitlines()
    try:
        rows = [[line.strip()] for line in lines] if kind == ".txt" else list(csv.reader(lines))
    except csv.Error as error:
        raise UserError(f"images={source}: not a list of files ({error})") from error
    head = rows[0] if rows else []
    named = next((head.index(name) for name in ("file", "path") if name in head), None)
    column = named or 0
    rows = [row for row in rows[named is not None :] if row]
    if short := [row for row in rows if len(row) <= column]:
        raise UserError(f"images={source}: the row {','.join(short[0])} has no {head[column]}")
    paths = [source.parent / row[column] for row in rows if row[column]]
    if absent := [path for path in paths if not path.is_file()]:
        where = "relative to its folder; a .csv has them in the column file or path, else in the first"
        raise UserError(f"images={source}: there is no {absent[0]}: paths in a list are {where}")
    return list(map(str, paths))
