"""scripts/bench/time_to_accuracy.py on a data set that a program can learn in seconds."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from time_to_accuracy import FILES, OPPONENT, RECIPES

NAMES = [*RECIPES, OPPONENT]


def race(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/bench/time_to_accuracy.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


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


def test_missing_data_is_refused_in_one_line(tmp_path: Path) -> None:
    done = race("--data-dir", str(tmp_path))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "no train-images-idx3-ubyte in" in done.stderr


@pytest.mark.slow
def test_recipes_and_opponent_race(bars: Path) -> None:
    done = race("--data-dir", str(bars), "--seeds", "2", "threads=1", "max_steps=2")
    assert done.returncode == 0, done.stderr
    rows = {name: next(line.split() for line in done.stdout.splitlines() if name in line) for name in NAMES}
    assert float(rows[OPPONENT][-3].rstrip("%")) >= 99
    for name in RECIPES:
        shares = [cell for cell in rows[name] if cell.rstrip(",").endswith("%")]
        assert len(shares) == 4, "the target, two seeds, their mean"
        times_as_fast = float(rows[OPPONENT][-2]) / float(rows[name][-2])
        assert float(rows[name][-1]) == pytest.approx(times_as_fast, rel=0.1)


def test_a_command_that_fails_is_named(bars: Path) -> None:
    done = race("--data-dir", str(bars), "--seeds", "1", "lr=-1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: src/train.py experiment=mnist_fast: exit code 2: error: lr=-1")
    assert len(done.stderr.splitlines()) == 1
