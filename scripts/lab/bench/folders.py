"""Compare train.py and predict.py on a folder of images with hand-written loops over a DataLoader."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
from bench.players import OPPONENTS, Row, program, row
from PIL import Image

from lockstep.report.summary import summary_of

TRAINED, PREDICTED, PIXELS, SIZE, CLASSES = 12_000, 3_000, 160, 32, ("dark", "light")
PROCESSES, BATCH = 2, 128
GOAL = 1.3  # times the loop's images per second, at least
TOLERANCE, ACCURACY = 1e-4, 0.02  # largest allowed differences of probabilities and of test accuracy
TASK = ["data=image_folder", f"data.image_size={SIZE}", "data.val_fraction=0", "data.augment=null", "model=small_cnn"]
TASK += ["scheduler=constant", "max_epochs=1", "logger=none", "callbacks.checkpoint.monitor=null"]
ALONE = ["threads=1", f"num_workers={PROCESSES}", f"batch_size={BATCH}"]


def folders(folder: Path, rounds: int = 5) -> list[Row]:
    """Measure images per second, with the same number of loader processes and one thread; the sides take turns.

    In training the clock counts an epoch but for its first steps; in prediction all after the weights are loaded.

    Raises:
        RuntimeError: the sides have not learnt, or predicted, the same.
    """
    for part, count in (("train", TRAINED), ("test", PREDICTED)):
        paint(folder / part, count // len(CLASSES))
    loop, table, test = str(OPPONENTS / "folder_loop.py"), folder / "loop.csv", folder / "test"
    speeds: list[list[float]] = [[], [], [], []]  # train.py's, the loop's, predict.py's, the loop's
    for number in range(rounds):
        run, out = folder / f"run_{number}", folder / f"predicted_{number}"
        program("src/train.py", *TASK, *ALONE, f"data_dir={folder}", f"hydra.run.dir={run}")
        output = program(loop, "train", *map(str, (folder / "train", test, PROCESSES, BATCH, SIZE))).split()
        learnt, accuracy = summary_of(run)["metrics"]["test/acc"], float(output[1])
        checkpoint = run / "checkpoints" / "last.ckpt"
        program("src/predict.py", *ALONE, f"checkpoint={checkpoint}", f"images={test}", f"hydra.run.dir={out}")
        output += program(loop, "predict", *map(str, (checkpoint, test, PROCESSES, BATCH, table))).split()
        apart = difference(out / "predictions.csv", table)
        if apart > TOLERANCE or abs(learnt - accuracy) > ACCURACY:
            raise RuntimeError(f"probabilities differ by {apart:.1g}, test accuracies are {learnt} and {accuracy}")
        ours = [summary_of(each)["throughput"]["samples_per_second"] for each in (run, out)]
        for speed, measured in zip(speeds, (ours[0], float(output[0]), ours[1], float(output[2])), strict=True):
            speed.append(measured)
    against = f"images a second against a DataLoader and a loop, {PROCESSES} processes"
    accuracies = f"test accuracy {learnt:.1%} and {accuracy:.1%}"
    same = f"probabilities differ by {apart:.1g} at most"
    options: dict[str, Any] = {"at_least": True, "unit": "/s"}
    return [
        row(f"train.py, {TRAINED} JPEG files: {against}", speeds[0], speeds[1], GOAL, check=accuracies, **options),
        row(f"predict.py, {PREDICTED} JPEG files: {against}", speeds[2], speeds[3], GOAL, check=same, **options),
    ]


def paint(folder: Path, count: int) -> None:
    """Write `count` JPEG files, as noisy as photographs, into a folder for each class.

    One file of ten is in the wrong class. The loss then stays above zero and gradients do not become denormal numbers,
    which are many times slower on some processors.
    """
    random = np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            coarse = random.integers(0, 160, (PIXELS // 8, PIXELS // 8, 3)).repeat(8, 0).repeat(8, 1)
            pixels = coarse + random.integers(0, 24, (PIXELS, PIXELS, 3)) + 60 * (label ^ (number % 10 == 0))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:05}.jpg", quality=85)


def difference(ours: Path, other: Path) -> float:
    """Return the largest difference between the probabilities of two tables."""
    tables = []
    for path in (ours, other):
        with open(path, newline="") as file:
            tables.append({line["file"]: [float(line[name]) for name in CLASSES] for line in csv.DictReader(file)})
    if tables[0].keys() != tables[1].keys():
        raise RuntimeError("the two sides did not predict the same files")
    return float(max(np.abs(np.subtract(tables[0][name], tables[1][name])).max() for name in tables[0]))
