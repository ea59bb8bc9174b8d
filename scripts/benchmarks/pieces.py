"""What cutting a step costs: 8 pieces against one, exact sums against plain ones, and how often ranks talk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.players import OPPONENTS, Row, play, row
from benchmarks.steps import CASES, COLOURED, SMALL, distance, make_task

PIECES = 8
CUT, EXACT = 1.03, {"mnist_cnn": 1.05, "resnet18": 1.10}  # goals
SIZES = {  # models: steps of a block, of which the first don't count; rounds of a game; games
    "mnist_cnn": (20, 2, 2, 3),
    "resnet18": (3, 1, 3, 1),
}
BATCH = {"mnist_cnn": 256, "resnet18": 128}
DATA = {"mnist_cnn": SMALL, "resnet18": COLOURED | {"samples": 5000}}


def measure(model: str, folder: Path) -> list[Row]:
    """A model on one device, beside it the loop with every lever, then ddp on two; one thread a worker.

    Raises:
        RuntimeError: the loop does not compute the same.
    """
    steps, skip, rounds, games = SIZES[model]
    case = replace(CASES[model], batch=BATCH[model], data=DATA[model])
    task, ours = make_task(case, steps * (rounds + 1), folder)
    bare = [str(OPPONENTS / "bare_loop.py"), "--task", str(task), "--levers"]
    cut = [*ours, f"pieces={PIECES}"]
    found = play(
        {
            "whole": [ours],
            "pieces": [cut],
            "exact": [[*cut, "exact=true"]],
            "bare, whole": [bare],
            "bare, pieces": [[*bare, "--pieces", str(PIECES)]],
        },
        rounds,
        steps,
        games=games,
        skip=skip,
        save_at=case.save_at,
        warm_up=False,
        folder=folder,
    )
    apart = distance(task, found["bare, pieces"].weights, found["pieces"].weights)
    if not apart <= case.apart[0]:
        raise RuntimeError(f"{model}: after {case.save_at} steps the weights are {apart:.1%} of their way off")
    blocks = {side: outcome.blocks for side, outcome in found.items()}
    what, goal = f"{model}, batch {BATCH[model]}, one device, {PIECES} pieces", CUT if model == "resnet18" else None
    rows = [
        row(f"{what}: against one piece", blocks["pieces"], blocks["whole"], goal),
        row(f"{what}: the same of the loop with every lever", blocks["bare, pieces"], blocks["bare, whole"], None),
        row(f"{what}: against that loop", blocks["pieces"], blocks["bare, pieces"], None, check=f"{apart:.1e} apart"),
        row(f"{what}: exact=true against false", blocks["exact"], blocks["pieces"], EXACT[model]),
    ]
    cut += ["strategy=ddp", "devices=2"]
    sides = {"pieces": [cut], "exact": [[*cut, "exact=true"]]}
    found = play(sides, rounds, steps, games=games, skip=skip, folder=folder)
    what = f"{model}, batch {BATCH[model]}, ddp on 2, {PIECES} pieces: exact=true against false"
    return [*rows, row(what, found["exact"].blocks, found["pieces"].blocks, EXACT[model])]


def collectives(folder: Path) -> Row:
    """All-reduces of an optimizer step under ddp on 2, with 8 pieces against with 2: counted by torch's profiler."""
    found = {pieces: _count(pieces, folder) for pieces in (2, PIECES)}
    return Row(
        f"resnet18, ddp on 2: all-reduces of a step, {PIECES} pieces against 2",
        found[PIECES],
        found[2],
        found[PIECES] / found[2],
        1.0,
        unit="",
    )


def _count(pieces: int, folder: Path) -> float:
    from lockstep.launch.agent import has_computed, launch
    from lockstep.loading import open_data
    from lockstep.run.config import check
    from lockstep.run.library import compose

    data = [f"data.{key}={value}" for key, value in DATA["resnet18"].items()]
    asked = ["model=resnet18", "data=synthetic", *data, "strategy=ddp", "devices=2", "batch_size=16"]
    asked += [f"pieces={pieces}", "threads=1", "max_steps=6", "callbacks=none", "logger=none"]
    config = check(compose(*asked))
    splits = open_data(config.data, config.data_dir, config.seed)
    with has_computed():  # another part may have, in this process: then a fork would hang
        found: float = launch(_work, config, replace(splits, val=None), folder, layout=config.layout)
    return found


def _work(config: Any, splits: Any, folder: Path) -> float:
    """All-reduces of each of the last steps, after DDP has rebuilt its buckets."""
    import lightning.pytorch as pl
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    from lockstep.launch import logs
    from lockstep.loading import DataModule
    from lockstep.run.build import make_module, make_trainer

    logs.configure(folder, dist.get_rank())
    profiler, first = profile(activities=[ProfilerActivity.CPU]), 3

    class Count(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == first:
                profiler.start()

        def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
            profiler.stop()

    data = DataModule(splits, config.layout, config.seed, dist.get_rank(), num_workers=0)
    trainer = make_trainer(config, folder, [Count()])
    trainer.fit(make_module(config, splits), datamodule=data)
    counted = sum(event.count for event in profiler.key_averages() if event.key == "gloo:all_reduce")
    return counted / (config.max_steps - first)
