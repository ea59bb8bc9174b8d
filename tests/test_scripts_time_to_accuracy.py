"""`benchmark.py accuracy` on a data set that a program can learn in seconds."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from parts.accuracy import RECIPES, accuracy

pytestmark = pytest.mark.usefixtures("forked_commands")

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@pytest.fixture
def bars(tmp_path: Path) -> Path:
    """Laid out as MNIST: ten kinds of images, a bright bar in another place each; 640 to train on and 100 to test."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for (images_file, labels_file), count in zip((FILES[:2], FILES[2:]), (640, 100), strict=True):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = np.zeros((count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[4 + 2 * label : 6 + 2 * label, 4:24] = 255
        for name, values in ((images_file, images), (labels_file, labels)):
            header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
            (raw / name).write_bytes(header + values.tobytes())
    return raw.parents[1]


@pytest.mark.slow
def test_recipes_and_opponent_race(bars: Path) -> None:
    rows = accuracy(str(bars), range(2), ("threads=1", "max_steps=2"))
    assert [row.what.partition(",")[0] for row in rows] == [*RECIPES]
    for row in rows:
        assert row.ratio == pytest.approx(row.other / row.ours)
        assert row.ours > 0.1
        assert row.check.count("%") == 3, "two seeds, their mean"


def test_a_command_that_fails_is_named(bars: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^src/train\.py experiment=mnist_fast: exit code 2: error: lr=-1"):
        accuracy(str(bars), range(1), ("lr=-1",))
