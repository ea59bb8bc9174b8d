"""Read the handwritten digits that ship with scikit-learn, at the size of MNIST's."""

import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.arithmetic.order import hash64
from lockstep.errors import UserError

SIZE = 28  # pixels, MNIST's


def read_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]]:
    """Read 1,797 digits, enlarged from 8 x 8 to 28 x 28 pixels.

    They are the test set of UCI's optical recognition of handwritten digits, and have no split of their own. The test
    set here is fixed: the 20% of each class with the smallest hashes (359 images).

    Returns:
        Images [n, 1, 28, 28], labels [n], and which of them are the test set [n].

    Raises:
        UserError: scikit-learn is not installed.
    """
    # Reading the file takes 0.1 s; importing scikit-learn for it would add 1.6 s to every start.
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise UserError("digits: their package is not installed: pip install scikit-learn")
    table = np.loadtxt(Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz"), delimiter=",")
    images = enlarge(table[:, :-1].reshape(-1, 8, 8).astype(np.int64), SIZE)[:, None]
    labels = table[:, -1].astype(np.int64)
    order = np.argsort(hash64(0xD161, np.arange(len(labels))), kind="stable")
    test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        members = order[labels[order] == label]
        test[members[: round(0.2 * len(members))]] = True
    return images, labels, test


def enlarge(images: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
    """Enlarge images [N, 8, 8] with values 0 to 16 to [N, size, size] with values 0 to 255, bilinearly.

    It computes in integers, so that every machine gets the same bytes and the same fingerprint.
    """
    small = images.shape[-1]
    # twice `size` times the position of each new pixel's centre among the old ones, kept between the outer centres
    at = np.clip((2 * np.arange(size) + 1) * small - size, 0, 2 * size * (small - 1))
    left = np.minimum(at // (2 * size), small - 2)
    right_weight = at - left * 2 * size
    weights = np.zeros((size, small), dtype=np.int64)
    weights[np.arange(size), left] = 2 * size - right_weight
    weights[np.arange(size), left + 1] = right_weight
    rows = np.einsum("as,nst->nat", weights, images)
    sums = np.einsum("bt,nat->nab", weights, rows)
    whole_weight = 16 * (2 * size) ** 2
    return ((sums * 255 + whole_weight // 2) // whole_weight).astype(np.uint8)
