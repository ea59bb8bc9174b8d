"""MNIST, Fashion-MNIST and CIFAR-10, read from their files; what is missing is downloaded by torchvision."""

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

from lockstep import ArrayDataset, Source, Spec, UserError

REMEDY = "remove it, and it is downloaded again"
TIMEOUT_SECONDS = 8  # that a server may be silent; a machine without network should learn it soon
MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def mnist(data_dir: str) -> Source:
    """MNIST (LeCun et al., 1998): 60,000 and 10,000 digits, 28 x 28, from `<data_dir>/MNIST/raw`."""
    return _idx_set("mnist", "MNIST", data_dir, Spec(1, 28, tuple("0123456789"), mean=(0.1307,), std=(0.3081,)))


def fashion_mnist(data_dir: str) -> Source:
    """Fashion-MNIST (Xiao et al., 2017): 60,000 and 10,000 pieces of clothing, from `<data_dir>/FashionMNIST/raw`."""
    return _idx_set("fashion_mnist", "FashionMNIST", data_dir, Spec(1, 28, CLOTHES, mean=(0.2860,), std=(0.3530,)))


def cifar10(data_dir: str) -> Source:
    """CIFAR-10 (Krizhevsky, 2009): 50,000 and 10,000 colour images, 32 x 32, from `<data_dir>/cifar-10-batches-py`."""
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity

    listed = [*CIFAR10.train_list, *CIFAR10.test_list, (CIFAR10.meta["filename"], CIFAR10.meta["md5"])]
    folder = Path(data_dir, CIFAR10.base_folder)
    missing = [name for name, _ in listed if not (folder / name).is_file()]
    if missing:
        _download("cifar10", "CIFAR10", CIFAR10.base_folder, data_dir, "data_batch_1 to 5, test_batch and batches.meta")
    for name, digest in listed:
        # These files are pickles, which can hold code: none is opened whose digest is not the published one.
        if not check_integrity(folder / name, digest):
            raise UserError(f"{folder / name}: damaged (its MD5 is not {digest}); {REMEDY}")
    train, test = CIFAR10(data_dir, train=True), CIFAR10(data_dir, train=False)
    spec = Spec(3, 32, tuple(train.classes), mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
    arrays = [ArrayDataset(part.data.transpose(0, 3, 1, 2), np.asarray(part.targets)) for part in (train, test)]
    return Source(arrays[0], arrays[1], spec)


def _idx_set(name: str, torchvision_name: str, data_dir: str, spec: Spec) -> Source:
    folder = Path(data_dir, torchvision_name, "raw")
    if not all(_plain_or_gzipped(folder, file).is_file() for file in MNIST_FILES):
        _download(name, torchvision_name, f"{torchvision_name}/raw", data_dir, ", ".join(MNIST_FILES))
    arrays = []
    for images_file, labels_file in (MNIST_FILES[:2], MNIST_FILES[2:]):
        images_path, labels_path = _plain_or_gzipped(folder, images_file), _plain_or_gzipped(folder, labels_file)
        images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
        if len(images) != len(labels):
            raise UserError(f"{labels_path}: {len(labels)} labels, but {images_path.name} has {len(images)} images")
        if images.shape[1:] != (spec.image_size, spec.image_size):
            raise UserError(f"{images_path}: images of {images.shape[1]} x {images.shape[2]} pixels, 28 x 28 expected")
        if len(labels) and labels.max() >= spec.num_classes:
            raise UserError(f"{labels_path}: label {labels.max()}, but there are {spec.num_classes} classes, from 0")
        arrays.append(ArrayDataset(images[:, None], labels))
    return Source(arrays[0], arrays[1], spec)


def _plain_or_gzipped(folder: Path, name: str) -> Path:
    return folder / name if (folder / name).is_file() else folder / f"{name}.gz"


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """A file in the IDX format (two zero bytes, type 8 for uint8, the number of dimensions, each size as a big-endian
    32-bit number, then the bytes), plain or gzipped.

    Raises:
        UserError: naming the file, what was expected and what was found.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            content = bytearray(file.read())  # a bytearray, since torch wants memory that may be written
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: damaged gzip file ({error}); {REMEDY}") from error
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from error
    header = 4 + 4 * dimensions
    magic = bytes((0, 0, 8, dimensions))
    if len(content) < header or content[:4] != magic:
        raise UserError(
            f"{path}: not an IDX file of {dimensions}-dimensional bytes: it starts with 0x{content[:4].hex()}, "
            f"0x{magic.hex()} expected; {REMEDY}"
        )
    sizes = struct.unpack(f">{dimensions}I", content[4:header])
    expected = header + math.prod(sizes)
    if len(content) != expected:
        state = "truncated" if len(content) < expected else "too long"
        raise UserError(f"{path}: {state}: {expected:,} bytes expected, {len(content):,} found; {REMEDY}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)


def _download(name: str, torchvision_name: str, result: str, data_dir: str, files: str) -> None:
    """torchvision's download, in a folder of its own beside the target: what was cut in half never looks complete, and
    several workers that torchrun started may do it at once."""
    try:
        Path(data_dir).mkdir(exist_ok=True)
        scratch = tempfile.mkdtemp(prefix=".download_", dir=data_dir)
    except OSError as error:
        reason = f"data_dir={data_dir} can't hold a download ({error.strerror})"
        raise UserError(f"{name}: {reason}; data=digits needs none") from error
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
            f"put {files} there, or use data=digits, which needs none"
        ) from error
    finally:
        socket.setdefaulttimeout(patience)
        shutil.rmtree(scratch, ignore_errors=True)


def _reason(error: BaseException) -> str:
    lines = [line.strip(" <>") for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:120]
