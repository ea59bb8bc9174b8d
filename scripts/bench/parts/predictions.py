"""predict.py on a folder of images, against the loop over a DataLoader that one would write."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
from parts.players import OPPONENTS, Row, program, row
from PIL import Image

IMAGES, PIXELS, CLASSES, PROCESSES, BATCH = 3000, 160, ("dark", "light"), 2, 128
GOAL = 1.0  # of the loop's images a second, at least
ALIKE = 1e-4  # between two probabilities


def predict(folder: Path, rounds: int = 5) -> list[Row]:
    """Images a second, with as many loader processes and one thread: both sides start the clock when the weights are
    loaded, and stop it with the last batch. They take turns.

    Raises:
        RuntimeError: the sides did not predict the same.
    """
    for part, count in (("train", 32), ("test", IMAGES // len(CLASSES))):
        paint(folder / part, count)
    task = ("data=image_folder", f"data_dir={folder}", "model=mnist_cnn", "logger=none", "threads=1")
    program("src/train.py", *task, "batch_size=32", "max_epochs=2", f"hydra.run.dir={folder / 'run'}")
    checkpoint = folder / "run" / "checkpoints" / "last.ckpt"
    ours, other = [], []
    size = ("threads=1", f"num_workers={PROCESSES}", f"batch_size={BATCH}")
    for number in range(rounds):
        out = folder / f"predicted_{number}"
        program(
            "src/predict.py", f"checkpoint={checkpoint}", f"images={folder / 'test'}", *size, f"hydra.run.dir={out}"
        )
        ours.append(json.loads((out / "summary.json").read_text())["throughput"]["samples_per_second"])
        loop = (str(OPPONENTS / "predict_loop.py"), str(checkpoint), str(folder / "test"), str(folder / "loop.csv"))
        other.append(float(program(*loop, str(PROCESSES), str(BATCH))))
    apart = difference(out / "predictions.csv", folder / "loop.csv")
    if apart > ALIKE:
        raise RuntimeError(f"the two sides' probabilities differ by {apart:.1g}")
    what = f"predict.py: images a second against a DataLoader and a loop, {PROCESSES} processes"
    found = row(what, ours, other, GOAL, at_least=True, unit="/s")
    found.check = f"{IMAGES} JPEG files of {PIXELS} pixels; probabilities differ by {apart:.1g} at most"
    return [found]


def paint(folder: Path, count: int) -> None:
    """JPEG files, as noisy as photographs are, a folder for each class."""
    random = np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            coarse = random.integers(0, 160, (PIXELS // 8, PIXELS // 8, 3)).repeat(8, 0).repeat(8, 1)
            pixels = coarse + random.integers(0, 24, (PIXELS, PIXELS, 3)) + 60 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:05}.jpg", quality=85)


def difference(ours: Path, other: Path) -> float:
    """The largest between two tables' probabilities."""
    tables = []
    for path in (ours, other):
        with open(path, newline="") as file:
            tables.append({line["file"]: [float(line[name]) for name in CLASSES] for line in csv.DictReader(file)})
    if tables[0].keys() != tables[1].keys():
        raise RuntimeError("the two sides did not predict the same files")
    return float(max(np.abs(np.subtract(tables[0][name], tables[1][name])).max() for name in tables[0]))
