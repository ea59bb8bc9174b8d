"""An epoch of MNIST: train.py against the way of pytorch/examples and that of Lightning's tutorials.

A block is 200 steps of 64 images. Epochs end inside of blocks, so what each side does there counts in proportion.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from parts.players import OPPONENTS, TRAIN, Row, faster, play

STEPS, ROUNDS, LR = 200, 4, 0.03
RACES = (("ours", "examples"), ("ours", "tutorial"), ("ours, bf16", "examples"), ("ours, bf16", "tutorial"))
GOALS = {1: (1.55, 1.85, 2.4, None), 2: (1.9, 2.1, 2.8, None)}  # by threads, of RACES
KINDS = {"examples": "pytorch/examples' way", "tutorial": "Lightning's tutorial way"}
PROGRAMS = {"examples": "torch_examples.py", "tutorial": "lightning_tutorial.py"}
ACCURACY = 0.02  # most that the sides' test accuracy after SAVE_AT steps may differ: their orders of samples do
SAVE_AT = 1000


def epoch(data_dir: str, folder: Path) -> list[Row]:
    """All races, with one and with two threads.

    Raises:
        RuntimeError: the sides have not learnt the same.
    """
    return [line for threads in GOALS for line in _races(data_dir, threads, folder)]


def _races(data_dir: str, threads: int, folder: Path) -> list[Row]:
    ours = [*TRAIN, "data=mnist", f"data_dir={data_dir}", "data.augment=null", "data.val_fraction=0", f"lr={LR}"]
    ours += ["scheduler=constant", f"threads={threads}", "max_epochs=2", "callbacks.checkpoint.monitor=null"]
    ours += [f"outputs={folder}/runs"]
    commands = {"ours": [ours], "ours, bf16": [[*ours, "precision=bf16-mixed"]]}
    for kind, program in PROGRAMS.items():
        base = [str(OPPONENTS / program), "--data-dir", data_dir, "--threads", str(threads)]
        for workers in ("0", "2"):
            commands[f"{kind}, {workers}"] = [[*base, "--epochs", "2", "--lr", str(LR), "--workers", workers]]
    found = play(commands, ROUNDS, STEPS, skip=0, save_at=SAVE_AT, threads=threads, folder=folder)
    learnt = {side: accuracy(outcome.weights, data_dir) for side, outcome in found.items()}
    least, most = min(learnt.values()), max(learnt.values())
    if most - least > ACCURACY:
        raise RuntimeError(f"test accuracy after {SAVE_AT} steps: {learnt}")
    rows = []
    for (side, kind), goal in zip(RACES, GOALS[threads], strict=True):
        other = min((found[f"{kind}, {n}"] for n in ("0", "2")), key=lambda outcome: median(outcome.blocks))
        name = f"MNIST, batch 64, {threads} thread{'s' * (threads > 1)}, {side}: times as fast as {KINDS[kind]}"
        told = f"test accuracy {learnt[side]:.1%}; all sides {least:.1%} to {most:.1%}"
        rows.append(faster(name, found[side].blocks, other.blocks, goal, check=told))
    return rows


def accuracy(weights: Path, data_dir: str) -> float:
    """Of saved weights on the test set."""
    import torch
    from torchvision.datasets import MNIST

    sys.path.append(str(OPPONENTS))
    from bare_loop import mnist_cnn

    test = MNIST(data_dir, train=False)
    images = (test.data[:, None].float() / 255 - 0.1307) / 0.3081
    net = mnist_cnn(1, 28, 10)
    for parameter, saved in zip(net.parameters(), torch.load(weights), strict=True):
        parameter.data.copy_(saved)
    with torch.inference_mode():
        found = torch.cat([net(part).argmax(1) for part in images.split(1000)])
    return float((found == test.targets).double().mean())
