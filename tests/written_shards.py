"""The images of a folder, written as shards: as tar files in two forms, and as parquet; and what is read of them."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from small_data import config

from lockstep.data.build import open_data

CLASSES = ("cat", "dog", "eel")


def write_folder(root: Path, counts: tuple[tuple[str, int], ...] = (("train", 14), ("test", 4))) -> Path:
    """Write `<root>/<part>/<class>/<number>.png or .jpg`; names sort otherwise than numbers."""
    rng = np.random.default_rng(1)
    for part, each in counts:
        for label, name in enumerate(CLASSES):
            (root / part / name).mkdir(parents=True)
            for number in range(each):
                pixels = rng.integers(0, 90, (22, 18, 3)) + 70 * label
                Image.fromarray(pixels.astype(np.uint8)).save(
                    root / part / name / f"{number}.{'png' if number % 2 else 'jpg'}"
                )
    return root


def opened(place: Any, name: str = "shards", **changes: Any) -> Any:
    """Open a data set by its page, with images of 12 pixels. A server that fails is given up soon."""
    options = {"image_size": 12, **({"retry_seconds": 1} if name == "shards" else {}), **changes}
    return open_data(config(name, **options), str(place))


def samples(part: Any) -> list[tuple[torch.Tensor, int]]:
    return [part[index] for index in range(len(part))]


def same(one: Any, other: Any) -> bool:
    """Return whether two parts, or lists of samples, have the same images and labels in the same order."""
    pairs = zip(samples(one), samples(other), strict=True)
    return len(one) == len(other) and all(a[1] == b[1] and torch.equal(a[0], b[0]) for a, b in pairs)


def picture(number: int = 0, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (number % 250, 0, 0)).save(file, form)
    return file.getvalue()


def write_tar(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    """Write a tar file; with the mode `a` append to one, with `w|` write it as to a pipe."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def flip(path: Path) -> None:
    """Change a byte of a shard's second image, after its header."""
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as archive:
        content[archive.getmembers()[1].offset_data + 60] ^= 1
    path.write_bytes(content)


def distributed(folder: Path, count: int, seed: int = 0) -> list[list[Path]]:
    """Distribute the images of a part to shards, in random order."""
    paths = np.array(sorted(folder.rglob("*.*")))
    return [list(part) for part in np.array_split(np.random.default_rng(seed).permutation(paths), count)]


def write_shards(folder: Path, root: Path, form: str, count: int = 3, seed: int = 0) -> Path:
    """Write each part of a folder to shards in `root`.

    Args:
        folder: as `write_folder` writes it.
        root: a new folder.
        form: `tar` (the folder's names), `webdataset` (a .cls member for each image) or `parquet`, as `datasets` does.
        count: shards of a part.
        seed: of the order in which images are written.
    """
    for part in sorted(path.name for path in folder.iterdir()):
        for number, paths in enumerate(distributed(folder / part, count, seed)):
            name = f"{part}-{number:05}"
            if form == "tar":
                write_tar(
                    root / f"{name}.tar",
                    {path.relative_to(folder / part).as_posix(): path.read_bytes() for path in paths},
                )
            elif form == "webdataset":
                members = {}
                for path in paths:
                    key = f"{path.parent.name}_{path.stem}"
                    members[f"{key}.cls"] = str(CLASSES.index(path.parent.name)).encode()
                    members[f"{key}{path.suffix}"] = path.read_bytes()
                write_tar(root / f"{name}.tar", members)
            else:
                write_parquet(root / f"{name}-of-{count:05}.parquet", paths)
    return root


def write_parquet(path: Path, images: list[Path]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": image.read_bytes(), "path": image.name} for image in images]
    labels = [CLASSES.index(image.parent.name) for image in images]
    pq.write_table(pa.table({"image": rows, "label": labels}), path, row_group_size=5)
    return path
