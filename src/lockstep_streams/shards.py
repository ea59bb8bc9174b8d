"""Open images in shards: tar files as WebDataset writes them, parquet files and MosaicML's MDS files."""

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.data.splits import Sizes, Source
from lockstep.errors import UserError
from lockstep.text import is_url, plural
from lockstep.vision.data.classes import ordered
from lockstep.vision.data.labelled import PARTS, check_bits, subsets
from lockstep.vision.data.options import SPLIT_RULE, ImageOptions, with_image_options
from lockstep.vision.data.walk import passed_over_text, walk
from lockstep_streams.mds import INDEX, check_named
from lockstep_streams.remote import Remote
from lockstep_streams.shard_files import IMAGES, PART_FOLDERS, Suffixes
from lockstep_streams.shard_index import Index, digest, open_index
from lockstep_streams.shard_scan import EXTENSIONS

DECODED = ("webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "jfif", "jpe")  # read if data.image names them
PART = re.compile(r"(?<![a-z])(train|val|test)(?:ing|id|idation)?(?![a-z])")  # in a file's path: train-00017.tar
SHARD = re.compile(
    r"\.(tar|parquet|mds)(\.(gz|bz2|xz|lzma|zst|zstd|lz4|br|snappy|z|zip|7z))?$|\.(tgz|tbz2?|txz|tzst)$"
    r"|\.(tar|parquet|mds)(\.\w+)*\.(part|partial|crdownload|download|aria2|filepart|tmp|temp|incomplete)$",
    re.IGNORECASE,
)  # some are refused
INCOMPLETE = re.compile(r"\.(part|partial|crdownload|download|aria2|filepart|tmp|temp|incomplete)$", re.IGNORECASE)
WANTED = "hold .tar or .parquet files, or .mds files of MosaicML, at any depth"


@with_image_options
def shards(
    data_dir: str,
    options: ImageOptions,
    image: Suffixes = None,
    label: str | None = "label",
    index_dir: str | None = None,
    window: int | None = None,
    cache: str | None = None,
    cache_gb: float | None = None,
    retry_seconds: float = 240.0,
) -> Source:
    """Open the tar, parquet and MDS files in a folder, or below a URL.

    A file belongs to the part that its path names, such as `train/` or `val-0001.tar`. If all belong to train, or none
    names a part, the images are split. data/shards.yaml describes the options.

    Images are numbered by class and name, however they are distributed to shards; with a window in the order of the
    shards' names and of their places in the shards.

    Raises:
        UserError: There are no shards, one is damaged, or labels, columns or parts are missing; or there is a window,
            and the images would be split.
    """
    size, channels, reading = options.image_size or 0, options.channels, options.reading
    of_index: dict[str, Any] = {"image": checked_suffixes(image), "label": label}
    if window is not None:  # without a window the options, which name the index, stay what they were
        of_index["by_place"] = True
    passed_over = ""
    root: Any
    if is_url(data_dir):
        root = data_dir
        remote = Remote(data_dir, of_index, cache, cache_gb, retry_seconds, index_dir)
        names, passed_over = remote.paths, remote.passed_over
    else:
        root = Path(data_dir).expanduser().absolute()
        if root.is_file():
            raise UserError(f"shards: data_dir={data_dir} is a file: must be its folder, {root.parent}")
        if not root.is_dir() and set("*?[{") & set(data_dir):
            raise UserError(f"shards: data_dir={data_dir} names several files: must be the folder that holds them")
        if not root.is_dir():
            raise UserError(f"shards: data_dir={data_dir} is no folder: it must {WANTED}")
        files_walk = walk(root, lambda name: name == INDEX or SHARD.search(name) is not None)
        hashes = check_named(str(root), files_walk.paths, lambda path: (root / path).read_bytes())
        names = [path for path in files_walk.paths if SHARD.search(path)]
        passed_over = passed_over_text(files_walk.passed_over, EXTENSIONS)
    of_part = parts_of(root, names)

    def open_with(**more: Any) -> Index:
        if is_url(data_dir):
            return remote.open(of_part, {**of_index, **more}, size, channels, reading)
        files = {part: [root / name for name in names] for part, names in of_part.items()}
        of_files = {root / name: of_file for name, of_file in hashes.items()}
        return open_index(root, files, {**of_index, **more}, index_dir, size, channels, reading, of_files)

    alone, split_here = len(of_part) == 1, bool(options.val_fraction or options.test_fraction)
    if window is not None and alone and split_here:
        fractions = f"data.val_fraction={options.val_fraction:g} and data.test_fraction={options.test_fraction:g}"
        right = "name train, val and test in the shards' paths, or use 0 for both"
        raise UserError(
            f"data.window={window}: {root} has one part, and {fractions} would take images out of all shards: {right}"
        )
    index = open_with()
    known = options.known_classes
    if known and (recorded := ordered(index.classes, known)) != index.classes:
        index = open_with(known_classes=recorded)
    if is_url(data_dir):
        remote.check_room(index, window)
    else:
        check_bits([*index.parts.values()])
    if len(index.classes) < 2:
        raise UserError(f"shards: {root} has only one class, {index.classes[0]}: it must have two at least")
    file_sizes: Sizes = ()
    if options.image_size is None or not is_url(data_dir):  # with a size, no shard is fetched for a line
        options, file_sizes = options.with_size([*index.parts.values()])
    train: Any
    val: Any
    test: Any
    if window is not None and alone:
        (train,), val, test, what = index.parts.values(), None, None, "all of them for training"
    elif alone:
        (images,) = index.parts.values()
        rule = [SPLIT_RULE, options.val_fraction, options.test_fraction, options.split_seed]
        ids = index.cached_arrays(f"split-{digest(rule)[:16]}", partial(options.split_ids, images))
        train, val, test = subsets(images, ids)
        what = options.split_text
    else:
        train, val, test = map(index.parts.get, PARTS)
        of_val = "a part of train is used for validation" if val is None and options.val_fraction else ""
        what = "nothing is tested" if test is None else of_val
    in_shards = passed_over_text(index.passed_over, IMAGES)
    if image is None and (others := [each[1:] for each in index.passed_over if each[1:] in DECODED]):
        in_shards += f" (data.image=[{','.join((*IMAGES, *others))}] reads those, too)"
    where_cached = f", kept in {remote.folder}" if is_url(data_dir) else ""
    count = sum(map(len, of_part.values()))
    where = f"shards: {plural(count, 'file')} in {root}{where_cached}, index in {index.folder}"
    texts = [where, what, passed_over, in_shards]
    about = "; ".join(filter(None, texts))
    spec = options.spec(index.classes)
    return Source(train, test, spec, val, about=about, split_by_opener=alone, window=window, file_sizes=file_sizes)


def checked_suffixes(image: Suffixes) -> str | list[str] | None:
    """Return the option data.image: a column, or endings of names in tar files in lower case, without a dot before."""
    if image is None:
        return None
    names = [image] if isinstance(image, str) else [*image]
    if not names or not all(isinstance(name, str) and name.strip(".") for name in names):
        raise UserError(f"data.image={image}: must be a column or an ending, or a list of endings: [jpg,webp]")
    return image if isinstance(image, str) else sorted({name.lstrip(".").lower() for name in names})


def parts_of(root: Path | str, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the shards of each part, sorted by name; `all`: of no part.

    Args:
        root: the folder or URL, for messages.
        names: the paths of the files below it.

    Raises:
        UserError: There are no shards, one is compressed, two differ in their endings alone, or only some name a part.
    """
    files = sorted(names, key=lambda name: name.split("/"))
    if others := [name for name in files if not name.lower().endswith(EXTENSIONS)]:
        why = "is compressed: unpack it, since its images are read singly"
        if INCOMPLETE.search(others[0]):
            why = "is a file that was not downloaded completely: complete or remove it"
        raise UserError(f"shards: {root}/{others[0]} {why}")
    stems: dict[str, str] = {}
    for name in files:
        stem = next(name[: -len(ending)] for ending in reversed(EXTENSIONS) if name.lower().endswith(ending))
        if (other := stems.setdefault(stem, name)) != name:
            twice = f"{name} and {other.rpartition('/')[2]} would be the same images twice"
            raise UserError(f"shards: {root}/{twice}: remove one of them, or give other names")
    if not files:
        raise UserError(f"shards: {root} has no shards: it must {WANTED}")
    of_part: dict[str, list[str]] = {part: [] for part in (*PARTS, "all")}
    for name in files:
        of_part[part_of(root, name)].append(name)
    of_part = {part: paths for part, paths in of_part.items() if paths}
    if "all" in of_part and len(of_part) > 1:
        other = next(iter(of_part.values()))[0].rpartition("/")[2]
        what = f"{root}/{of_part['all'][0]} is of no part, {other} of one"
        raise UserError(f"shards: {what}: all paths must name train, val or test, or none")
    if not {"train", "all"} & of_part.keys():
        raise UserError(f"shards: {root} has {' and '.join(of_part)}, and no train: a path must name it")
    return of_part


def part_of(root: Path | str, path: str) -> str:
    """Return the part that a path names; `all` if it names none.

    It is that of the file's name, else of the nearest folder that is called as a part, else of the nearest one whose
    name has a part in it.

    Raises:
        UserError: A name has two parts in it, or the file's name another one than the folder of a part, or such a
            folder another one than a folder in it.
    """
    *folders, name = path.lower().split("/")
    called = [(at, PART_FOLDERS[folder]) for at, folder in enumerate(folders) if folder in PART_FOLDERS]
    in_names = [(at, parts) for at, each in enumerate([*folders, name]) if (parts := {*PART.findall(each)})]
    if not in_names:
        return "all"
    at, parts = in_names[-1]
    if called and called[-1][0] < at:
        parts = parts | {called[-1][1]}  # train/val-0.tar, train/test-run/0.tar
    if len(parts) > 1:
        right = "rename it, so that the nearest name tells one"
        raise UserError(f"shards: {root}/{path} names {' and '.join(sorted(parts))}: {right}")
    return parts.pop()
