"""Write images as shards, in a folder or below a URL:

    lockstep shards images s3://bucket/images
    lockstep shards images.csv /scratch/shards --megabytes 256
    lockstep shards images s3://bucket/images --format mds

The images are those of `data=image_folder` (train/<class>/, and test/ or val/ or both, or class folders alone) or the
rows of a CSV file with the columns path, label and optionally split, as `data=image_list` reads it. A part's images are
mixed by a hash of `--seed` and their names, and shards are filled one after the other. So the same images make the same
shards, byte for byte. Several are written at a time. Shards that are there with the same content are passed over, so a
program that was interrupted goes on where it was.

In a tar shard, an image of a class folder is `<class>/<name>`; one of a list is followed by its label, in
`<name>.cls`. With `--format mds` the same images in the same shards are MosaicML's: `train/shard.00000.mds`, with an
index.json in each folder. A sample has the columns image (jpeg or png if all are; else bytes) and label (str).
Exit codes: 0 written, 2 bad input, or a place that can't be written.
"""

import argparse
import hashlib
import io
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from lockstep.config.value_checks import place
from lockstep.data.datasets import innermost_dataset
from lockstep.errors import UserError
from lockstep.files import link_file, write
from lockstep.launch.machine import available_cores
from lockstep.programs.common.parser import parser_of
from lockstep.text import is_url, join_names, plural
from lockstep.vision.data import image_folder, image_list
from lockstep.vision.data.labelled import PARTS
from lockstep_streams.mds import MOST_BYTES, index_of, write_mds
from lockstep_streams.remote import Remote
from lockstep_streams.server import UNKNOWN, Unavailable, digest_of, states
from lockstep_streams.shard_files import IMAGES
from lockstep_streams.shards import SHARD

JPEG = (".jpe", ".jfif")  # endings that are written as .jpg
ENCODINGS = {"jpg": "jpeg", "jpeg": "jpeg", "png": "png"}  # of MDS, by ending
MIB = 1 << 20
ROUNDED = tarfile.BLOCKSIZE


class Image(NamedTuple):
    """An image to be written.

    Attributes:
        name: in a tar shard.
        label: its class.
        is_labelled: whether the name begins with the label. If not, a tar shard has it in a member of its own.
    """

    name: str
    label: str
    is_labelled: bool
    path: Path
    size: int


class Format(Protocol):
    """A format of shards."""

    def name(self, part: str, number: int) -> str:
        """Return the path of a shard."""

    def write(self, file: IO[bytes], images: Sequence[Image]) -> None:
        """Write a shard that depends on nothing but the images."""

    def indexes(self, shards: Mapping[str, tuple[int, int]]) -> dict[str, bytes]:
        """Return the files that a reader of this format needs beside the shards, by path.

        Args:
            shards: size in bytes and number of images of each shard, by path.
        """


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program's arguments."""
    made = parser_of("shards", __doc__)
    made.add_argument("images", help="a folder of images, or a CSV file that lists some")
    made.add_argument("place", help="a folder or a URL for the shards")
    made.add_argument("--format", choices=("tar", "mds"), default="tar", help="of the shards (default tar)")
    made.add_argument("--megabytes", type=int, default=64, help="size of a shard, in MiB (default 64)")
    made.add_argument("--seed", type=int, default=0, help="of the order of the images")
    made.add_argument("--retry-seconds", type=float, default=240.0, help="as the key data.retry_seconds")
    return made


def main(words: list[str]) -> int:
    """Write the shards. Return the exit code.

    Raises:
        UserError: the images can't be read, or the place can't be written or has other shards.
    """
    chosen = parser().parse_args(words)
    if chosen.megabytes < 1:
        raise UserError(f"--megabytes={chosen.megabytes}: must be at least 1")
    target = place(chosen.place)
    if "{" in target:
        raise UserError(f"lockstep shards: {target}: must be one place, without braces")
    of_part = parts(chosen.images)
    size = chosen.megabytes * MIB
    kind: Format = Tar() if chosen.format == "tar" else Mds([*chain(*of_part.values())], size)
    shards = {
        kind.name(part, number): images
        for part, listed in of_part.items()
        for number, images in enumerate(cut(mixed(listed, chosen.seed), size))
    }
    writer = Folder(Path(target), kind) if not is_url(target) else Store(target, kind, chosen.retry_seconds)
    if others := [name for name in writer.names() if SHARD.search(name) and name not in shards]:
        raise UserError(f"{target}: has other shards, {join_names(others)}: give an empty place")
    with ThreadPoolExecutor(available_cores()) as pool:
        for number, done in enumerate(pool.map(lambda item: writer(*item), shards.items())):
            print(f"{number + 1} of {len(shards)}: {done}", file=sys.stderr)
    counts = f"{plural(len(shards), 'shard')} with {plural(sum(map(len, shards.values())), 'image')}"
    writer.finish()
    print(f"{counts} in {target}")
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
    """Yield the images of each shard, of about `size` bytes as a tar file, so that formats have the same shards."""
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


class Tar:
    """Tar files as WebDataset reads them."""

    def name(self, part: str, number: int) -> str:
        return f"{part}-{number:05}.tar"

    def write(self, file: IO[bytes], images: Sequence[Image]) -> None:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for each in images:
                contents = {each.name: each.path.read_bytes()}
                if not each.is_labelled:
                    folder, slash, name = each.name.rpartition("/")
                    contents[f"{folder}{slash}{name.partition('.')[0]}.cls"] = each.label.encode()
                for name, content in contents.items():
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))

    def indexes(self, shards: Mapping[str, tuple[int, int]]) -> dict[str, bytes]:
        return {}


class Mds:
    """MosaicML's format.

    Args:
        images: all images, which decide the encoding of the column.
        size: of a shard, in bytes.

    Raises:
        UserError: the shards would be too large.
    """

    def __init__(self, images: Sequence[Image], size: int) -> None:
        if size >= MOST_BYTES:
            raise UserError(f"--megabytes={size // MIB}: an MDS shard has less than 4 GiB: must be at most 4000")
        kinds = {ENCODINGS.get(each.name.rpartition(".")[2], "bytes") for each in images}
        self.columns = {"image": kinds.pop() if len(kinds) == 1 else "bytes", "label": "str"}
        self.size = size

    def name(self, part: str, number: int) -> str:
        return f"{'' if part == 'all' else f'{part}/'}shard.{number:05}.mds"

    def write(self, file: IO[bytes], images: Sequence[Image]) -> None:
        samples = ({"image": each.path.read_bytes(), "label": each.label.encode()} for each in images)
        write_mds(file, self.columns, self.size, len(images), samples)

    def indexes(self, shards: Mapping[str, tuple[int, int]]) -> dict[str, bytes]:
        folders: dict[str, dict[str, tuple[int, int]]] = {}
        for path, each in sorted(shards.items()):
            folder, slash, name = path.rpartition("/")
            folders.setdefault(folder + slash, {})[name] = each
        return {f"{folder}index.json": index_of(self.columns, self.size, named) for folder, named in folders.items()}


class Folder:
    """Writes shards into a folder."""

    def __init__(self, folder: Path, kind: Format) -> None:
        self.folder, self.kind = folder, kind
        self.shards: dict[str, tuple[int, int]] = {}  # see `Format.indexes`
        folder.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        """Return the files that are there."""
        return [path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()]

    def __call__(self, name: str, images: Sequence[Image]) -> str:
        """Write a shard, unless it is there. Return what was done."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".writing_") as scratch:
            made = Path(scratch, "shard")
            with open(made, "wb") as file:
                self.kind.write(file, images)
            self.shards[name] = made.stat().st_size, len(images)
            if (self.folder / name).is_file() and same_content(made, self.folder / name):
                return f"{name} is there"
            (self.folder / name).parent.mkdir(exist_ok=True)
            link_file(made, self.folder / name)
        return f"{name} written"

    def finish(self) -> None:
        """Write what the format needs."""
        for path, content in self.kind.indexes(self.shards).items():
            write(self.folder / path, content)


class Store:
    """Writes shards below a URL."""

    def __init__(self, url: str, kind: Format, retry_seconds: float) -> None:
        self.kind = kind
        self.remote = Remote(
            url, {"image": None, "label": "label"}, retry_seconds=retry_seconds, anew=True, may_be_empty=True
        )
        self.shards: dict[str, tuple[int, int]] = {}  # see `Format.indexes`

    def names(self) -> list[str]:
        """Return the shards that are there."""
        return self.remote.paths

    def __call__(self, name: str, images: Sequence[Image]) -> str:
        """Write a shard, unless it is there. Return what was done."""
        server = self.remote.server
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch, "shard")
            with open(made, "w+b") as file:
                self.kind.write(file, images)
                file.flush()
                size = os.fstat(file.fileno()).st_size
                old_size, version = self.remote.stats.get(name, UNKNOWN)
                is_present = old_size == size and states(version, file)
            if not is_present:
                self._write(name, made)
        stat = server.tried(partial(server.stat, name), f"{server.url}/{name}")
        if stat[0] != size:
            raise UserError(f"{server.url}/{name}: has {stat[0]:,} bytes and not {size:,}: start the program again")
        self.shards[name] = size, len(images)
        return f"{name} {'is there' if is_present else 'written'}"

    def _write(self, name: str, file: Path) -> None:
        """Write a file below the URL.

        Raises:
            UserError: it can't be written.
        """
        server = self.remote.server
        try:
            server.write(name, file)
        except (Unavailable, NotImplementedError) as error:
            why = str(error) or "the server is read-only"
            raise UserError(f"{server.url}/{name}: can't be written: {why}") from error

    def finish(self) -> None:
        """Write what the format needs."""
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch, "index")
            for path, content in self.kind.indexes(self.shards).items():
                made.write_bytes(content)
                self._write(path, made)


def same_content(one: Path, other: Path) -> bool:
    """Check whether two files have the same bytes."""
    if one.stat().st_size != other.stat().st_size:
        return False
    with open(one, "rb") as first, open(other, "rb") as second:
        return digest_of(first, "sha256") == digest_of(second, "sha256")
