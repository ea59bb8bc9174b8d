"""Open image files: a folder for each class, or images without labels to be predicted."""

import csv
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.splits import Source
from lockstep.errors import UserError
from lockstep.vision.data.classes import class_names
from lockstep.vision.data.labelled import (
    MODES,
    PARTS,
    LabelledFiles,
    check_bits,
    check_headers,
    decodable,
    unique_images,
)
from lockstep.vision.data.options import ImageOptions, with_image_options
from lockstep.vision.data.pixels import Reading
from lockstep.vision.data.targets import table_lines
from lockstep.vision.data.walk import Walk, entries, is_folder, is_left_behind, local_folder, passed_over_text, walk

# .jfif and .jpe are JPEG.
EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
KNOWN = f"known are {', '.join(EXTENSIONS)}"  # for messages
OTHERWISE = {"train", "training", "val", "valid", "validation", "test", "testing"}  # hardly names of classes
WANTED = "hold train/ with test/ or val/ or both, and in each a folder of images per class; or these folders alone"


@with_image_options
def image_folder(data_dir: str, options: ImageOptions, skip_broken: bool = False) -> Source:
    """Open images that are sorted into a folder for each class.

    Either `<data_dir>` has `train/<class>/`, and `test/<class>/` or `val/<class>/` or both; without `test/` nothing is
    tested. Or it has `<class>/` alone, and the images are split. data/image_folder.yaml describes the options.

    Raises:
        UserError: Folders or images are missing or can't be read, the folders' classes differ, or an image lies in two
            parts or classes.
    """
    if not isinstance(skip_broken, bool):
        raise ValueError(f"skip_broken={skip_broken}: must be true or false")
    root = local_folder("image_folder", data_dir)
    if not root.is_dir():
        raise UserError(f"image_folder: data_dir={data_dir} is no folder: it must {WANTED}")
    folders, beside = _folders(root)
    parts = [name for name in PARTS if name in folders]
    doubtful = sorted({name for name in folders if name.lower() in OTHERWISE} - set(PARTS))
    if doubtful:
        rename = f"rename it to one of {', '.join(PARTS)}"
        raise UserError(f"image_folder: {root} has a folder {doubtful[0]}, which is no class: {rename}")
    if parts and ("train" not in parts or len(parts) == 1):
        lacks = "train/" if "train" not in parts else "neither test/ nor val/"
        alone = f": use data_dir={root / 'train'} to split it" if parts == ["train"] else ""
        raise UserError(f"image_folder: {root} has {parts[0]}/ and {'no ' * (lacks == 'train/')}{lacks}{alone}")
    passed_over = beside + Counter(f"{name}/" for name in folders if name not in parts) if parts else Counter()
    opened, inodes = {}, []
    for name in parts or [""]:
        files, classes, walked = open_classes(root / name, options)
        opened[name] = (files, classes)
        inodes.append(walked.inodes)
        passed_over += walked.passed_over
    classes = opened[parts[0] if parts else ""][1]
    if len(classes) < 2:
        only = f"{root / parts[0] if parts else root} has only one folder, {classes[0]}"
        raise UserError(f"image_folder: {only}: it must have a folder for each class, two at least")
    for name, (_, others) in opened.items():
        if differing := sorted(set(classes) ^ set(others)):
            odd = f"only {'train' if differing[0] in classes else name}/ has {differing[0]}"
            raise UserError(f"image_folder: train/ and {name}/ in {root} must have the same classes; {odd}")
    opened, again = _each_image_once(opened, inodes)
    left_out = ""
    if skip_broken:
        ids, left_out = decodable([part for part, _ in opened.values()])
        opened = {name: (part.part(good), classes) for (name, (part, _)), good in zip(opened.items(), ids, strict=True)}
        for name, (part, _) in opened.items():
            if empty := sorted(set(range(len(classes))) - set(part.labels.tolist())):
                where = root / name / classes[empty[0]]
                raise UserError(f"image_folder: no image in {where} can be decoded: repair one, or remove the folder")
    check_headers([part for part, _ in opened.values()])
    options, file_sizes = options.with_size([part for part, _ in opened.values()])
    what = ""
    if parts:
        train, val, test = (opened[name][0] if name in opened else None for name in PARTS)
        if test is None:
            what = "nothing is tested"
        elif val is None and options.val_fraction:
            what = "a part of train/ is used for validation"
    else:
        train, val, test = options.split(opened[""][0])
        what = options.split_text
    layout = ", ".join(f"{name}/" for name in parts) or "a folder per class"
    texts = [f"{layout} in {root}", what, left_out, again, passed_over_text(passed_over, EXTENSIONS)]
    about = f"image_folder: {'; '.join(filter(None, texts))}"
    return Source(
        train, test, options.spec(classes), val, about=about, split_by_opener=not parts, file_sizes=file_sizes
    )


def _folders(root: Path) -> tuple[list[str], Counter[str]]:
    """Return the names of the folders in `root`, sorted, and the number of other entries by kind, as of `Walk`."""
    names, others = [], Walk()
    for entry in entries(root):
        if entry.name.startswith("."):
            others.pass_over(entry.name + "/" * entry.is_dir(follow_symlinks=False), is_image(entry.name))
        elif not is_folder(entry) and is_image(entry.name):
            others.passed_over["beside the folders"] += 1
        elif not is_folder(entry):
            others.pass_over(entry.name)
        elif is_left_behind(entry.name):
            others.pass_over(f"{entry.name}/")
        else:
            names.append(entry.name)
    return sorted(names), others.passed_over


def open_classes(root: Path, options: ImageOptions) -> tuple[LabelledFiles, list[str], Walk]:
    """Return the images of the class folders in `root`, the names of the classes in order, and what the walk found.

    Raises:
        UserError: There is no class folder, one has no image or a name that is not UTF-8, or two names look alike.
    """
    folders, beside = _folders(root)
    if not folders:
        raise UserError(f"image_folder: {root} has no folders: it must {WANTED}")
    for name in map(os.fsencode, folders):
        if name.decode(errors="replace").encode() != name:
            raise UserError(f"image_folder: {root} has a folder whose name is not UTF-8, {name!r}: rename it")
    walks = {name: walk(root, is_image, name) for name in folders}
    counts = {name: len(each.paths) for name, each in walks.items()}
    if empty := [name for name, count in counts.items() if not count]:
        known = passed_over_text(walks[empty[0]].passed_over, EXTENSIONS) or KNOWN
        raise UserError(f"image_folder: no image in {root / empty[0]}: {known}")
    where = f"image_folder: the folders in {root}"
    class_of, classes = class_names(counts, where, known_classes=options.known_classes)
    folder_of = {class_of[name]: name for name in folders}
    ordered_walks = [walks[folder_of[name]] for name in classes]
    labels = np.repeat(np.arange(len(classes)), [len(each.paths) for each in ordered_walks])
    names = np.array([*chain.from_iterable(each.paths for each in ordered_walks)])
    inodes = [*chain.from_iterable(each.inodes for each in ordered_walks)]
    passed_over = sum((each.passed_over for each in ordered_walks), beside)
    files = LabelledFiles(root, names, labels, options.image_size or 0, options.channels, reading=options.reading)
    return files, classes, Walk([], inodes, passed_over)


def _each_image_once(
    opened: Mapping[str, tuple[LabelledFiles, list[str]]], inodes: Sequence[Sequence[int]]
) -> tuple[dict[str, tuple[LabelledFiles, list[str]]], str]:
    """Return the parts without files that are links to others of them, and a text that counts these.

    Args:
        opened: the images and classes of each part.
        inodes: of the images of each part. Only if one is there twice, files are looked at.

    Raises:
        UserError: A file is in two parts or classes.
    """
    _, first, counts = np.unique(np.array([*chain(*inodes)], dtype=np.uint64), return_inverse=True, return_counts=True)
    ids = np.flatnonzero(counts[first] > 1)
    borders = np.cumsum([0, *map(len, inodes)])
    of_part = np.searchsorted(borders, ids, side="right") - 1
    parts = [*opened]
    images = [(parts[part], int(number - borders[part])) for part, number in zip(of_part, ids, strict=True)]
    paths = [opened[name][0].path(index) for name, index in images]
    classes = [opened[name][1][opened[name][0].labels[index]] for name, index in images]
    keep, text = unique_images(paths, classes, [f"{name}/" for name, _ in images], lambda number: str(paths[number]))
    again = {images[number] for number in set(range(len(images))) - set(keep.tolist())}
    once = {}
    for name, (part, names) in opened.items():
        others = [index for part_name, index in again if part_name == name]
        once[name] = (part.part(np.delete(np.arange(len(part)), others)) if others else part, names)
    return once, text


def is_image(name: str) -> bool:
    """Check whether a file's name has an ending of images."""
    return name.lower().endswith(EXTENSIONS)


class ImageFiles(LabelledFiles):
    """Images without labels. An item is `(image, its number)`. The images of a folder are sorted.

    An image that can't be decoded is black and has the number -1, so it has no row among the predictions.

    Args:
        images: a folder, with images at any depth; a file; a list of paths, .txt (one a line) or .csv (in the column
            `file` or `path`, else the first); or several of these.
        image_size: pixels.
        channels: 1 or 3.
        background, bits: see `pixels.Reading`.

    Attributes:
        about: a text that counts files that were passed over.

    Raises:
        UserError: A path does not exist, there is no image, none can be decoded, or `channels` is not 1 or 3.
    """

    uses_random_numbers = False

    def __init__(
        self,
        images: str | Path | Sequence[str],
        image_size: int,
        channels: int,
        background: str | Sequence[int] = "white",
        bits: int | None = None,
    ) -> None:
        if channels not in MODES:
            raise UserError(f"images={images}: files have 1 or 3 channels, but the model was trained on {channels}")
        sources = [images] if isinstance(images, str | Path) else images
        parts = [Path(str(each)).expanduser() for each in sources]
        alone = len(parts) == 1 and _is_folder(parts[0])  # then names are relative to this folder
        passed_over: Counter[str] = Counter()
        names: list[str] = []
        for part in parts:
            if _is_folder(part):
                walked = walk(part, is_image)
                names += walked.paths if alone else [str(part / name) for name in walked.paths]
                passed_over += walked.passed_over
            else:
                names += _paths(part)
        self.about = passed_over_text(passed_over, EXTENSIONS)
        if not names:
            raise UserError(f"images={images}: no image in it: {self.about or KNOWN}")
        root = parts[0] if alone else Path()
        reading = Reading(background, bits)
        super().__init__(root, np.array(names), np.arange(len(names)), image_size, channels, reading=reading)
        if all(self[index][1] < 0 for index in range(len(self))):  # stops at the first that can be decoded
            raise UserError(f"images={images}: no image can be decoded, {names[0]} for example")
        check_bits([self])

    def decoded(self, index: int, image_size: int | None) -> tuple[Tensor, Any]:
        try:
            return super().decoded(index, image_size)
        except UserError:
            return torch.zeros(self.channels, self.image_size, self.image_size, dtype=torch.uint8), -1


def _is_folder(source: Path) -> bool:
    """Check whether a path of the user's is a folder.

    Raises:
        UserError: It is missing, can't be read, or is neither a folder nor a file.
    """
    try:
        mode = os.stat(source).st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = 0
    except OSError as error:
        raise UserError(f"images={source}: can't be read ({error.strerror})") from error
    if not (S_ISDIR(mode) or S_ISREG(mode)):
        raise UserError(f"images={source}: no such file or folder")
    return S_ISDIR(mode)


def _paths(source: Path) -> list[str]:
    """Return the image files that a path of no folder stands for. Paths in a list are relative to its folder."""
    kind = source.suffix.lower()
    if kind not in (".txt", ".csv"):
        return [str(source)]
    try:
        lines = source.read_text("utf-8-sig", errors="surrogateescape").splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"images={source}: can't be read ({error.strerror})") from error
    of_table = [] if kind == ".txt" else table_lines(csv.reader(lines, strict=True), f"images={source}")
    rows = [[line.strip()] for line in lines] if kind == ".txt" else [values for _, values in of_table]
    head = rows[0] if rows else []
    named = next((head.index(name) for name in ("file", "path") if name in head), None)
    column = named or 0
    rows = [row for row in rows[named is not None :] if row]
    if short := [row for row in rows if len(row) <= column]:
        raise UserError(f"images={source}: the row {','.join(short[0])} has no {head[column]}")
    paths = [source.parent / row[column] for row in rows if row[column]]
    if absent := [path for path in paths if not os.path.isfile(path)]:
        where = "relative to its folder; a .csv has them in the column file or path, else in the first"
        raise UserError(f"images={source}: there is no {absent[0]}: paths in a list are {where}")
    return list(map(str, paths))
