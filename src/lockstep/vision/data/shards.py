"""Open images in shards: tar files as WebDataset writes them, parquet files and MosaicML's MDS files."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lockstep.data.datasets import Sizes, Source
from lockstep.errors import UserError
from lockstep.text import is_url, plural
from lockstep.vision.data.classes import ordered
from lockstep.vision.data.labelled import (
    PARTS,
    SPLIT_RULE,
    check_bits,
    choose_image_size,
    image_spec,
    split_ids,
    split_text,
    subsets,
)
from lockstep.vision.data.mds import INDEX, check_named
from lockstep.vision.data.pixels import Reading
from lockstep.vision.data.remote import Remote
from lockstep.vision.data.shard_files import IMAGES
from lockstep.vision.data.shard_index import Index, digest, open_index
from lockstep.vision.data.shard_scan import EXTENSIONS
from lockstep.vision.data.walk import passed_over_text, walk

PART = re.compile(r"(?<![a-z])(train|val|test)(?:ing|id|idation)?(?![a-z])")  # in a file's path: train-00017.tar
SHARD = re.compile(r"\.(tar|parquet|mds)(\.\w+)?$|\.tgz$")  # some are refused
WANTED = "hold .tar or .parquet files, or .mds files of MosaicML, at any depth"


def shards(
    data_dir: str,
    image: str | None = None,
    label: str = "label",
    index_dir: str | None = None,
    image_size: int | None = None,
    channels: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    split_seed: int = 0,
    background: str | Sequence[int] = "white",
    bits: int | None = None,
    window: int | None = None,
    cache: str | None = None,
    cache_gb: float | None = None,
    retry_seconds: float = 240.0,
    known_classes: Sequence[str] = (),
) -> Source:
    """Open the tar, parquet and MDS files in a folder, or below a URL.

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
    options: dict[str, Any] = {"image": image, "label": label}
    if window is not None:  # without a window the options, which name the index, stay what they were
        options["by_place"] = True
    passed_over = ""
    root: Any
    if is_url(data_dir):
        root = data_dir
        remote = Remote(data_dir, options, cache, cache_gb, retry_seconds, index_dir)
        names = remote.paths
    else:
        root = Path(data_dir).expanduser().absolute()
        if not root.is_dir():
            raise UserError(f"shards: data_dir={data_dir} is no folder: it must {WANTED}")
        files_walk = walk(root, lambda name: name == INDEX or SHARD.search(name) is not None)
        check_named(str(root), files_walk.paths, lambda path: (root / path).read_bytes())
        names = [path for path in files_walk.paths if SHARD.search(path)]
        passed_over = passed_over_text(files_walk.passed_over, EXTENSIONS)
    of_part = parts_of(root, names)

    def open_with(**more: Any) -> Index:
        if is_url(data_dir):
            return remote.open(of_part, {**options, **more}, image_size or 0, channels, reading)
        files = {part: [root / name for name in names] for part, names in of_part.items()}
        return open_index(root, files, {**options, **more}, index_dir, image_size or 0, channels, reading)

    alone, split_here = len(of_part) == 1, bool(val_fraction or test_fraction)
    if window is not None and alone and split_here:
        fractions = f"data.val_fraction={val_fraction:g} and data.test_fraction={test_fraction:g} would take images out"
        right = "name train, val and test in the shards' paths, or use 0 for both"
        raise UserError(f"data.window={window}: {root} has one part, and {fractions} of all shards: {right}")
    index = open_with()
    if known_classes and (recorded := ordered(index.classes, known_classes)) != index.classes:
        index = open_with(known_classes=recorded)
    if is_url(data_dir):
        remote.check_room(index, window)
    else:
        check_bits([*index.parts.values()])
    if len(index.classes) < 2:
        raise UserError(f"shards: {root} has only one class, {index.classes[0]}: it must have two at least")
    file_sizes: Sizes = ()
    if image_size is None or not is_url(data_dir):  # with a size, no shard is fetched for a line
        image_size, file_sizes = choose_image_size(image_size, [*index.parts.values()])
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
    in_shards = passed_over_text(index.passed_over, IMAGES)
    where_cached = f", kept in {remote.folder}" if is_url(data_dir) else ""
    count = sum(map(len, of_part.values()))
    where = f"shards: {plural(count, 'file')} in {root}{where_cached}, index in {index.folder}"
    texts = [where, what, passed_over, in_shards]
    about = "; ".join(filter(None, texts))
    spec = image_spec(image_size, channels, mean, std, index.classes)
    return Source(train, test, spec, val, about=about, split_by_opener=alone, window=window, file_sizes=file_sizes)


def parts_of(root: Path | str, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the shards of each part, sorted by name; `all`: of no part.

    Args:
        root: the folder or URL, for messages.
        names: the paths of the files below it.

    Raises:
        UserError: There are no shards, one is compressed, two differ in their endings alone, or only some name a part.
    """
    files = sorted(names, key=lambda name: name.split("/"))
    if packed := [name for name in files if not name.endswith(EXTENSIONS)]:
        raise UserError(f"shards: {root}/{packed[0]} is compressed: unpack it, since its images are read singly")
    stems: dict[str, str] = {}
    for name in files:
        stem = next(name.removesuffix(ending) for ending in reversed(EXTENSIONS) if name.endswith(ending))
        if (other := stems.setdefault(stem, name)) != name:
            twice = f"{name} and {other.rpartition('/')[2]} would be the same images twice"
            raise UserError(f"shards: {root}/{twice}: remove one of them, or give other names")
    if not files:
        raise UserError(f"shards: {root} has no shards: it must {WANTED}")
    of_part: dict[str, list[str]] = {part: [] for part in (*PARTS, "all")}
    for name in files:
        of_part[part_of(name)].append(name)
    of_part = {part: paths for part, paths in of_part.items() if paths}
    if "all" in of_part and len(of_part) > 1:
        other = next(iter(of_part.values()))[0].rpartition("/")[2]
        what = f"{root}/{of_part['all'][0]} is of no part, {other} of one"
        raise UserError(f"shards: {what}: all paths must name train, val or test, or none")
    if len(of_part) > 1 and "train" not in of_part:
        raise UserError(f"shards: {root} has {' and '.join(of_part)}, and no train: a path must name it")
    return of_part


def part_of(path: str) -> str:
    """Return the part that a path names; `all` if it names none."""
    match = PART.search(path.lower())
    return match.group(1) if match else "all"
