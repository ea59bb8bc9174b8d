"""Write images as tar shards into a folder:

    lockstep shards images shards
    lockstep shards images.csv /scratch/shards --megabytes 256

The images are those of `data=image_folder` (train/<class>/, and test/ or val/ or both, or class folders alone) or the
rows of a CSV file with the columns path, label and optionally split, as `data=image_list` reads it. A part's images are
mixed by a hash of `--seed` and their names, and shards are filled one after the other. So the same images make the same
shards, byte for byte. Several are written at a time.

An image of a class folder is `<class>/<name>`; one of a list is followed by its label, in `<name>.cls`.
Exit codes: 0 written, 2 bad input, or a place that can't be written.
"""

import argparse
import hashlib
import io
import os
import sys
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.data.datasets import innermost_dataset
from lockstep.errors import UserError
from lockstep.files import replacing
from lockstep.launch.machine import available_cores
from lockstep.programs.common.parser import parser_of
from lockstep.text import is_url, join_names, plural
from lockstep.vision.data import image_folder, image_list
from lockstep.vision.data.labelled import PARTS
from lockstep_streams.shard_files import IMAGES
from lockstep_streams.shards import SHARD

JPEG = (".jpe", ".jfif")  # endings that are written as .jpg
MIB = 1 << 20
ROUNDED = tarfile.BLOCKSIZE


class Image(NamedTuple):
    """An image to be written.

    Attributes:
        name: in the shard.
        label: its class.
        is_labelled: whether the name begins with the label. If not, it is in a member of its own.
    """

    name: str
    label: str
    is_labelled: bool
    path: Path
    size: int


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program's arguments."""
    made = parser_of("shards", __doc__)
    made.add_argument("images", help="a folder of images, or a CSV file that lists some")
    made.add_argument("place", help="a folder for the shards")
    made.add_argument("--megabytes", type=int, default=64, help="size of a shard, in MiB (default 64)")
    made.add_argument("--seed", type=int, default=0, help="of the order of the images")
    return made


def main(words: list[str]) -> int:
    """Write the shards. Return the exit code.

    Raises:
        UserError: the images can't be read, or the place can't be written or has other shards.
    """
    chosen = parser().parse_args(words)
    if chosen.megabytes < 1:
        raise UserError(f"--megabytes={chosen.megabytes}: must be at least 1")
    if is_url(chosen.place):
        raise UserError(f"lockstep shards: {chosen.place}: must be a folder, which the store's own program then copies")
    folder = Path(chosen.place)
    shards = {
        f"{part}-{number:05}.tar": images
        for part, listed in parts(chosen.images).items()
        for number, images in enumerate(cut(mixed(listed, chosen.seed), chosen.megabytes * MIB))
    }
    folder.mkdir(parents=True, exist_ok=True)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    if others := [name for name in names if SHARD.search(name) and name not in shards]:
        raise UserError(f"{folder}: has other shards, {join_names(others)}: give an empty place")
    with ThreadPoolExecutor(available_cores()) as pool:
        written = pool.map(lambda item: write_tar(folder / item[0], item[1]), shards.items())
        for number, name in enumerate(shards):
            next(written)
            print(f"{number + 1} of {len(shards)}: {name}", file=sys.stderr)
    print(f"{plural(len(shards), 'shard')} with {plural(sum(map(len, shards.values())), 'image')} in {folder}")
    return 0


def parts(images: str) -> dict[str, list[Image]]:
    """Return the images of each part; the part `all`, if there is only one.

    Raises:
        UserError: There are none, or one has a format that shards don't have.
    """
    is_list = Path(images).is_file()
    options: dict[str, Any] = {"val_fraction": 0.0, "test_fraction": 0.0}
    source = image_list(csv=images, **options) if is_list else image_folder(images, **options)
    datasets = {name: getattr(source, name) for name in PARTS if getattr(source, name) is not None}
    images_of = {}
    for part, dataset in datasets.items():
        files: Any = innermost_dataset(dataset)
        ids = range(len(files)) if files is dataset else np.asarray(dataset.indices).tolist()
        images_of["all" if len(datasets) == 1 else part] = [
            image(files.path(number), files.name(number), source.spec.classes[int(files.labels[number])], is_list)
            for number in ids
        ]
    for listed in images_of.values():
        check_names(listed, is_list)
    return images_of


def image(path: Path, name: str, label: str, is_list: bool) -> Image:
    """Return an image with its name in a shard, which has the label as its first folder, unless it is of a list."""
    stem, ending = os.path.splitext(name)
    ending = ".jpg" if ending.lower() in JPEG else ending.lower()
    if ending[1:] not in IMAGES:
        raise UserError(f"{path}: shards have images of the kinds {', '.join(IMAGES)}: convert it")
    if is_list:
        inside = (stem if not os.path.isabs(stem) else stem.lstrip("/")) + ending
        return Image(
            "/".join(part for part in inside.split("/") if part not in ("", ".", "..")),
            label,
            False,
            path,
            path.stat().st_size,
        )
    _, _, inside = (stem + ending).rpartition(f"{label}/")
    return Image(f"{label}/{inside}", label, True, path, path.stat().st_size)


def check_names(images: Sequence[Image], is_list: bool) -> None:
    """Refuse images that a reader of shards would take for one.

    Raises:
        UserError: There are such.
    """
    keys: dict[str, Image] = {}
    for each in images:
        folder, _, file = each.name.rpartition("/")
        key = f"{folder}/{file.partition('.')[0]}" if is_list else each.name
        before = keys.setdefault(key, each)
        if before is not each:
            raise UserError(f"{before.path} and {each.path} would have the name {key} in a shard: rename one of them")


def mixed(images: Sequence[Image], seed: int) -> list[Image]:
    """Return images in an order that a seed and their names decide."""
    return sorted(
        images, key=lambda each: hashlib.sha256(f"{seed} {each.name}".encode(errors="surrogateescape")).digest()
    )


def cut(images: Sequence[Image], size: int) -> Iterator[list[Image]]:
    """Yield the images of each shard, of about `size` bytes."""
    shard: list[Image] = []
    filled = 0
    for each in images:
        takes = ROUNDED + -(-each.size // ROUNDED) * ROUNDED + (0 if each.is_labelled else 2 * ROUNDED)
        if shard and filled + takes > size:
            yield shard
            shard, filled = [], 0
        shard.append(each)
        filled += takes
    if shard:
        yield shard


def write_tar(path: Path, images: Sequence[Image]) -> None:
    """Write a shard as WebDataset reads it. It depends on nothing but the images."""
    with replacing(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for each in images:
            contents = {each.name: each.path.read_bytes()}
            if not each.is_labelled:
                folder, slash, name = each.name.rpartition("/")
                contents[f"{folder}{slash}{name.partition('.')[0]}.cls"] = each.label.encode()
            for name, content in contents.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
