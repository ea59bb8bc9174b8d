"""A folder of images, against the loops over a DataLoader that one would write: train.py, and predict.py."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from parts.players import OPPONENTS, Row, program, row
from PIL import Image

from lockstep.run.summary import summary_of

TRAINED, PREDICTED, PIXELS, SIZE, CLASSES = 12_000, 3_000, 160, 32, ("dark", "light")
PROCESSES, BATCH = 2, 128
GOAL = 1.3  # of the loop's images a second, at least
ALIKE, ACCURACY = 1e-4, 0.02  # most that the sides' probabilities, and their test accuracy, may differ


def folders(folder: Path, rounds: int = 5) -> list[Row]:
    """Images a second, with as many loader processes and one thread; the sides take turns. Training, the clock
    counts an epoch but for its first steps; predicting, what follows the loading of the weights.

    Raises:
        RuntimeError: the sides have not learnt, or predicted, the same.
    """
    for part, count in (("train", TRAINED), ("test", PREDICTED)):
        paint(folder / part, count // len(CLASSES))
    size = ("threads=1", f"num_workers={PROCESSES}", f"batch_size={BATCH}")
    task = (
        "data=image_folder",
        f"data_dir={folder}",
        f"data.image_size={SIZE}",
        "data.val_fraction=0",
        "data.augment=null",
    )
    task += (
        "model=mnist_cnn",
        "scheduler=constant",
        "max_epochs=1",
        "logger=none",
        "callbacks.checkpoint.monitor=null",
    )
    loop = str(OPPONENTS / "folder_loop.py")
    trained: list[tuple[float, float]] = []
    predicted: list[tuple[float, float]] = []
    for number in range(rounds):
        run, out = folder / f"run_{number}", folder / f"predicted_{number}"
        program("src/train.py", *task, *size, f"hydra.run.dir={run}")
        ours = summary_of(run)
        other = program(loop, "train", *map(str, (folder / "train", folder / "test", PROCESSES, BATCH, SIZE))).split()
        trained.append((ours["throughput"]["samples_per_second"], float(other[0])))
        learnt = ours["metrics"]["test/acc"], float(other[1])
        if abs(learnt[0] - learnt[1]) > ACCURACY:
            raise RuntimeError(f"test accuracy after an epoch: {learnt}")
        checkpoint = run / "checkpoints" / "last.ckpt"
        asked = (f"checkpoint={checkpoint}", f"images={folder / 'test'}", f"hydra.run.dir={out}")
        program("src/predict.py", *asked, *size)
        other = program(
            loop, "predict", *map(str, (checkpoint, folder / "test", PROCESSES, BATCH, folder / "loop.csv"))
        )
        predicted.append((summary_of(out)["throughput"]["samples_per_second"], float(other)))
        apart = difference(out / "predictions.csv", folder / "loop.csv")
        if apart > ALIKE:
            raise RuntimeError(f"the two sides' probabilities differ by {apart:.1g}")
    files, what = (
        f"JPEG files of {PIXELS} pixels",
        f"images a second against a DataLoader and a loop, {PROCESSES} processes",
    )
    checks = [f"{TRAINED} {files}; test accuracy {learnt[0]:.1%}, {learnt[1]:.1%}"]
    checks += [f"{PREDICTED} {files}; probabilities differ by {apart:.1g} at most"]
    return [
        row(f"{name}: {what}", *zip(*both, strict=True), GOAL, at_least=True, unit="/s", check=check)
        for name, both, check in zip(("train.py", "predict.py"), (trained, predicted), checks, strict=True)
    ]


def paint(folder: Path, count: int) -> None:
    """JPEG files, as noisy as photographs are, `count` in a folder for each class."""
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
