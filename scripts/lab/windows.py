"""Measure what a window of shards costs in shuffling, in the worst case: shards sorted by class.

    python scripts/lab/windows.py <folder>      # with train/<class>/ and test/<class>/; writes docs/results/windows.md

The images are written to shards of `--shard` images each, class by class, so almost every shard has one class. A
permutation of all images and windows of some shards are compared: by the entropy of the classes in a step and in a
piece, in bits, the mean over the first epoch; and by the test accuracy of small nets after `--epochs` epochs:
`mnist_cnn` has no BatchNorm, and `fast_cnn` has, whose statistics are of a piece. A second table has the entropy of a
step by pieces. Accuracies are means over seeds, with the lowest and the highest.

Exit codes: 0 written, 1 a run failed, 2 bad input.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np
from bench.machine import cpu_name
from nightly import commit_of
from repository import ROOT

from lockstep.arithmetic.layout import resolve
from lockstep.config.pages import group_file
from lockstep.data import Splits
from lockstep.data.build import open_data
from lockstep.launch.machine import available_cores
from lockstep.programs.common.showing import markdown
from lockstep.report.summary import summary_of

PAGE = ROOT / "docs" / "results" / "windows.md"
WINDOWS: tuple[int | None, ...] = (None, 8, 4, 2)
BATCH, PIECES = 128, (1, 4, 16)  # the second number of pieces is that of the runs
MODELS = (("mnist_cnn", "lr=0.01"), ("fast_cnn", "model.width=[8,16,32,64]", "lr=0.05"))
TASK = (
    *("data=shards", "data.image_size=32", "data.val_fraction=0", "scheduler=cosine", "accelerator=cpu", "logger=none"),
    *(f"batch_size={BATCH}", f"pieces={PIECES[1]}", "num_workers=0", "threads=1"),
)
TITLE = """# What a window of shards costs in shuffling

    python scripts/lab/windows.py images

wrote this page; `images` has the folders `train` and `test`, with a folder for each class.
[data.window](../use/shards-and-hub.md#a-window-of-shards) is compared with a permutation of all images in its worst
case: the shards are sorted by class, so each has images of one class, or of two.
"""


def write_sorted_shards(folder: Path, root: Path, size: int) -> int:
    """Write the images of class folders to tar files, class by class, `size` in each. Return the shards of train."""
    shards = 0
    for part in ("train", "test"):
        paths = sorted(path for path in (folder / part).glob("*/*") if path.is_file())
        for number, start in enumerate(range(0, len(paths), size)):
            with tarfile.open(root / f"{part}-{number:05}.tar", "w", dereference=True) as tar:
                for path in paths[start : start + size]:
                    tar.add(path, path.relative_to(folder / part).as_posix())
            shards += part == "train"
    return shards


def opened(root: Path, window: int | None) -> Splits:
    """Open the shards."""
    config = group_file("data", "shards")
    return open_data({**config, "image_size": 32, "val_fraction": 0, "window": window}, str(root))


def entropies(splits: Splits, pieces: int) -> tuple[float, float]:
    """Return the entropy in bits of the classes in a step, and in a piece: means over the steps of the first epoch."""
    layout = resolve(strategy="single", accelerator="cpu", devices=1, num_nodes=1, batch_size=BATCH, pieces=pieces)
    order, labels = splits.order(layout, seed=0), np.asarray(splits.train.labels)
    steps = [order.pieces(0, index) for index in range(order.samples // BATCH)]  # without a short last one
    of_step = mean(entropy(labels[np.concatenate(step)]) for step in steps)
    return of_step, mean(entropy(labels[piece]) for step in steps for piece in step)


def entropy(labels: np.ndarray) -> float:
    """Return the entropy of some labels in bits."""
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    return float(-(shares * np.log2(shares)).sum())


def accuracy(root: Path, outputs: Path, overrides: Sequence[str]) -> float:
    """Return the test accuracy of a run of src/train.py."""
    command = [sys.executable, "src/train.py", *TASK, f"data_dir={root}", f"outputs={outputs}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        print(f"error: {' '.join(command)}\n{done.stderr}", file=sys.stderr)
        sys.exit(1)
    (summary,) = outputs.rglob("summary.json")
    return float(summary_of(summary.parent)["metrics"]["test/acc"])


def text_of(window: int | None) -> str:
    return "all (no window)" if window is None else str(window)


def main() -> int:
    """Write the shards, compute the entropies, train, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shard", type=int, default=100, help="images of a shard (default: 100)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=2, help="runs of each kind (default: 2)")
    options = parser.parse_args()
    if not (options.folder / "train").is_dir() or not (options.folder / "test").is_dir():
        print(f"error: {options.folder} has no train/ and test/: it must have both", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        root = scratch / "shards"
        root.mkdir()
        shards = write_sorted_shards(options.folder, root, options.shard)
        sets = {window: opened(root, window) for window in WINDOWS}
        runs = [(window, model, seed) for window in WINDOWS for model in MODELS for seed in range(options.seeds)]

        def run(of: tuple[int | None, tuple[str, ...], int]) -> float:
            window, (model, *keys), seed = of
            chosen = [f"model={model}", *keys, f"data.window={'null' if window is None else window}", f"seed={seed}"]
            chosen += [f"max_epochs={options.epochs}"]
            score = accuracy(root, scratch / f"{window}-{model}-{seed}", chosen)
            print(*chosen, score, flush=True)
            return score

        with ThreadPoolExecutor(available_cores()) as pool:
            scores = dict(zip(runs, pool.map(run, runs), strict=True))
        rows, by_pieces = [], []
        for window, splits in sets.items():
            row = [text_of(window), *(f"{each:.2f}" for each in entropies(splits, PIECES[1]))]
            for model in MODELS:
                of_model = [scores[window, model, seed] for seed in range(options.seeds)]
                row.append(f"{mean(of_model):.3f} ({min(of_model):.3f} to {max(of_model):.3f})")
            rows.append(row)
            by_pieces.append([text_of(window), *(f"{entropies(splits, pieces)[0]:.2f}" for pieces in PIECES)])
        count, tested, classes = len(splits.train), len(splits.test), splits.spec.num_classes
    about = (
        f"{count:,} images of {classes} classes in {shards} shards, {tested:,} test images; steps of {BATCH} images in "
        f"{PIECES[1]} pieces; {options.epochs} epochs, {options.seeds} seeds."
    )
    machine = f"{available_cores()} cores of {cpu_name()}, commit {commit_of(ROOT)}."
    columns = ["shards in a window", "entropy of a step", "of a piece", "mnist_cnn", "fast_cnn (BatchNorm)"]
    limits = f"Entropies are in bits, at most {np.log2(classes):.2f}. By the pieces of a step:"
    of_pieces = ["shards in a window", *(f"{pieces} piece{'s' * (pieces > 1)}" for pieces in PIECES)]
    parts = [
        TITLE,
        f"{about}\n{machine}\n",
        markdown(columns, rows),
        f"\n{limits}\n",
        markdown(of_pieces, by_pieces),
        "",
    ]
    PAGE.write_text("\n".join(parts))
    print(PAGE.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
