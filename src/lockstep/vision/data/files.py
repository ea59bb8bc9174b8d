"""Open MNIST, Fashion-MNIST and CIFAR-10 from their files. torchvision downloads missing ones."""

import gzip
import logging
import math
import os
import shutil
import socket
import struct
import tempfile
import zlib
from http.client import HTTPException
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.data.datasets import ArrayDataset
from lockstep.data.splits import Source, Spec
from lockstep.errors import UserError
from lockstep.vision.data.walk import local_folder

REMEDY = "remove it to download it again"
TIMEOUT_SECONDS = 8  # timeout of the server; short, so that machines without network do not wait long
MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def mnist(data_dir: str) -> Source:
    """Open MNIST (LeCun et al., 1998), 60,000 and 10,000 digits of 28 x 28 pixels, from `<data_dir>/MNIST/raw`."""
    return _idx_set("mnist", "MNIST", data_dir, Spec(1, 28, tuple("0123456789"), mean=(0.1307,), std=(0.3081,)))


def fashion_mnist(data_dir: str) -> Source:
    """Open Fashion-MNIST (Xiao et al., 2017), 60,000 and 10,000 clothes, from `<data_dir>/FashionMNIST/raw`."""
    return _idx_set("fashion_mnist", "FashionMNIST", data_dir, Spec(1, 28, CLOTHES, mean=(0.2860,), std=(0.3530,)))


def cifar10(data_dir: str) -> Source:
    """Open CIFAR-10 (Krizhevsky, 2009), 50,000 and 10,000 colour images, from `<data_dir>/cifar-10-batches-py`."""
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity

    listed = [*CIFAR10.train_list, *CIFAR10.test_list, (CIFAR10.meta["filename"], CIFAR10.meta["md5"])]
    folder = local_folder("cifar10", data_dir) / CIFAR10.base_folder
    missing = [name for name, _ in listed if not (folder / name).is_file()]
    if missing:
        _download("cifar10", "CIFAR10", CIFAR10.base_folder, data_dir, "data_batch_1 to 5, test_batch and batches.meta")
    for name, digest in listed:
        # These files are pickles, which can hold code. So each must have its published digest before it is opened.
        if not check_integrity(folder / name, digest):
            raise UserError(f"{folder / name}: damaged, its MD5 is not {digest}: {REMEDY}")
    train, test = CIFAR10(data_dir, train=True), CIFAR10(data_dir, train=False)
    spec = Spec(3, 32, tuple(train.classes), mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
    arrays = [ArrayDataset(part.data.transpose(0, 3, 1, 2), np.asarray(part.targets)) for part in (train, test)]
    return Source(arrays[0], arrays[1], spec)


def _idx_set(name: str, torchvision_name: str, data_dir: str, spec: Spec) -> Source:
    """Open a data set of four IDX files, and download missing ones first."""
    folder = local_folder(name, data_dir) / torchvision_name / "raw"
    if not all(_plain_or_gzipped(folder, file).is_file() for file in MNIST_FILES):
        _download(name, torchvision_name, f"{torchvision_name}/raw", data_dir, ", ".join(MNIST_FILES))
    arrays = []
    for images_file, labels_file in (MNIST_FILES[:2], MNIST_FILES[2:]):
        images_path, labels_path = _plain_or_gzipped(folder, images_file), _plain_or_gzipped(folder, labels_file)
        images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
        if len(images) != len(labels):
            what = f"{len(labels)} labels, but {images_path.name} has {len(images)} images"
            raise UserError(f"{labels_path}: {what}: {REMEDY}")
        if images.shape[1:] != (spec.image_size, spec.image_size):
            size = f"{images.shape[1]} x {images.shape[2]}"
            raise UserError(f"{images_path}: images have {size} pixels: they must have 28 x 28")
        if len(labels) and labels.max() >= spec.num_classes:
            last = spec.num_classes - 1
            raise UserError(f"{labels_path}: there is a label {labels.max()}: labels must be 0 to {last}")
        arrays.append(ArrayDataset(images[:, None], labels))
    return Source(arrays[0], arrays[1], spec)


def _plain_or_gzipped(folder: Path, name: str) -> Path:
    return folder / name if (folder / name).is_file() else folder / f"{name}.gz"


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read a file in the IDX format, plain or gzipped.

    The format: two zero bytes, the type 8 for uint8, the number of dimensions, each size as a big-endian 32-bit number,
    and the values.

    Returns:
        An array with this number of dimensions.

    Raises:
        UserError: The file is missing or damaged. The message has what was expected and what is there.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            content = bytearray(file.read())  # torch needs writable memory
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: damaged gzip file ({error}): {REMEDY}") from error
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from error
    header = 4 + 4 * dimensions
    magic = bytes((0, 0, 8, dimensions))
    if len(content) < header or content[:4] != magic:
        raise UserError(
            f"{path}: not an IDX file with {dimensions} dimensions, it starts with 0x{content[:4].hex()} "
            f"and not with 0x{magic.hex()}: {REMEDY}"
        )
    sizes = struct.unpack(f">{dimensions}I", content[4:header])
    expected = header + math.prod(sizes)
    if len(content) != expected:
        state = "truncated" if len(content) < expected else "too long"
        raise UserError(f"{path}: {state}, it has {len(content):,} bytes instead of {expected:,}: {REMEDY}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)


def _download(name: str, torchvision_name: str, result: str, data_dir: str, files: str) -> None:
    """Download a data set with torchvision.

    The download goes to a new folder beside the target, and its files are moved when it is complete. So an interrupted
    download never looks complete, and several workers of an engine may download at the same time.
    """
    try:
        Path(data_dir).mkdir(exist_ok=True)
        scratch = tempfile.mkdtemp(prefix=".download_", dir=data_dir)
    except OSError as error:
        reason = f"data_dir={data_dir} can't hold a download ({error.strerror})"
        raise UserError(f"{name}: {reason}: use another data_dir, or data=digits, which needs no download") from error
    patience = socket.getdefaulttimeout()
    try:
        from torchvision import datasets

        logging.getLogger("lockstep").info("downloading %s to %s", torchvision_name, data_dir)
        socket.setdefaulttimeout(TIMEOUT_SECONDS)
        getattr(datasets, torchvision_name)(scratch, download=True)
        target = Path(data_dir, result)
        target.mkdir(parents=True, exist_ok=True)
        for file in Path(scratch, result).iterdir():
            os.replace(file, target / file.name)
    except (RuntimeError, OSError, EOFError, HTTPException) as error:
        raise UserError(
            f"{name}: no files in {Path(data_dir, result)} and the download failed ({_reason(error)}): "
            f"put {files} there, or use data=digits, which needs no download"
        ) from error
    finally:
        socket.setdefaulttimeout(patience)
        shutil.rmtree(scratch, ignore_errors=True)


def _reason(error: BaseException) -> str:
    """Return the last line of an error's message."""
    lines = [line.strip(" <>") for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:120]
