"""Open images in shards: tar files as WebDataset writes them, and parquet files."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.data.datasets import Source
from lockstep.errors import UserError
from lockstep.text import plural
from lockstep.vision.data.classes import ordered
from lockstep.vision.data.labelled import PARTS, SPLIT_RULE, check_bits, image_spec, split_ids, split_text, subsets
from lockstep.vision.data.pixels import Reading
from lockstep.vision.data.shard_files import IMAGES
from lockstep.vision.data.shard_index import digest, open_index
from lockstep.vision.data.walk import passed_over_text, walk

PART = re.compile(r"(?<![a-z])(train|val|test)(?:ing|id|idation)?(?![a-z])")  # in a file's path: train-00017.tar
EXTENSIONS = (".tar", ".parquet")
SHARD = re.compile(r"\.tar$|\.parquet$|\.tgz$|\.tar\.\w+$")  # the last two are refused
WANTED = "hold .tar or .parquet files, at any depth"


def shards(
    data_dir: str,
    image: str | None = None,
    label: str = "label",
    index_dir: str | None = None,
    image_size: int = 32,
    channels: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    split_seed: int = 0,
    background: str | Sequence[int] = "white",
    bits: int | None = None,
    window: int | None = None,
    known_classes: Sequence[str] = (),
) -> Source:
    """Open the tar and parquet files in a folder.

    A file belongs to the part that its path names, such as `train/` or `val-0001.tar`. If all belong to train, or none
    names a part, the images are split. data/shards.yaml describes the options. `known_classes` comes from a
    checkpoint, see `classes.ordered`.

    Images are numbered by class and name, however they are distributed to shards; with a window in the order of the
    shards' names and of their places in the shards.

    Raises:
        UserError: There are no shards, one is damaged, or labels, columns or parts are missing; or there is a window,
            and the images would be split.
    """
    image_spec(image_size, channels, mean, std, ())  # refuse bad options first
    reading = Reading(background, bits)
    root = Path(data_dir).expanduser().absolute()
    if not root.is_dir():
        raise UserError(f"shards: data_dir={data_dir} is no folder: it must {WANTED}")
    files_walk = walk(root, lambda name: SHARD.search(name) is not None)
    files = sorted(root / path for path in files_walk.paths)
    if packed := [path for path in files if path.suffix not in EXTENSIONS]:
        raise UserError(f"shards: {packed[0]} is compressed: unpack it to a .tar file, whose images can be read singly")
    if not files:
        raise UserError(f"shards: {root} has no shards: it must {WANTED}")
    of_part = {name: [path for path in files if part_of(path.relative_to(root)) == name] for name in (*PARTS, "all")}
    of_part = {name: paths for name, paths in of_part.items() if paths}
    if "all" in of_part and len(of_part) > 1:
        other = f"{of_part['all'][0]} is of no part, {next(iter(of_part.values()))[0].name} of one"
        raise UserError(f"shards: {other}: all paths must name train, val or test, or none")
    if len(of_part) > 1 and "train" not in of_part:
        raise UserError(f"shards: {root} has {' and '.join(of_part)}, and no train: a path must name it")
    alone, split_here = len(of_part) == 1, bool(val_fraction or test_fraction)
    if window is not None and alone and split_here:
        fractions = f"data.val_fraction={val_fraction:g} and data.test_fraction={test_fraction:g} would take images out"
        right = "name train, val and test in the shards' paths, or use 0 for both"
        raise UserError(f"data.window={window}: {root} has one part, and {fractions} of all shards: {right}")
    options: dict[str, Any] = {"image": image, "label": label}
    if window is not None:  # without a window the options, which name the index, stay what they were
        options["by_place"] = True
    index = open_index(root, of_part, options, index_dir, image_size, channels, reading)
    if known_classes and (recorded := ordered(index.classes, known_classes)) != index.classes:
        options["known_classes"] = recorded
        index = open_index(root, of_part, options, index_dir, image_size, channels, reading)
    check_bits([*index.parts.values()])
    if len(index.classes) < 2:
        raise UserError(f"shards: {root} has only one class, {index.classes[0]}: it must have two at least")
    train: Any
    val: Any
    test: Any
    if window is not None and alone:
        (train,), val, test, what = index.parts.values(), None, None, "all of them for training"
    elif alone:
        (images,) = index.parts.values()
        name = f"split-{digest([SPLIT_RULE, val_fraction, test_fraction, split_seed])[:16]}"
        ids = index.cached_arrays(name, lambda: split_ids(images, val_fraction, test_fraction, split_seed))
        train, val, test = subsets(images, ids)
        what = split_text(val_fraction)
    else:
        train, val, test = map(index.parts.get, PARTS)
        of_val = "a part of train is used for validation" if val is None and val_fraction else ""
        what = "nothing is tested" if test is None else of_val
    passed_over = passed_over_text(files_walk.passed_over, EXTENSIONS)
    in_shards = passed_over_text(index.passed_over, IMAGES)
    texts = [f"shards: {plural(len(files), 'file')} in {root}, index in {index.folder}", what, passed_over, in_shards]
    about = "; ".join(filter(None, texts))
    spec = image_spec(image_size, channels, mean, std, index.classes)
    return Source(train, test, spec, val, about=about, split_by_opener=alone, window=window)


def part_of(path: Path) -> str:
    """Return the part that a path names; `all` if it names none."""
    match = PART.search(path.as_posix().lower())
    return match.group(1) if match else "all"
