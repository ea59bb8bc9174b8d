"""What cutting a step costs: 8 pieces against one, exact sums against plain ones, and how often ranks talk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.players import OPPONENTS, Row, play, row

PIECES = 8
CUT, EXACT = 1.03, {"mnist_cnn": 1.05, "resnet18": 1.10}  # goals
DATA = {
    "mnist_cnn": ("data.samples=20000",),
    "resnet18": ("data.samples=5000", "data.channels=3", "data.image_size=32"),
}
BATCH = {"mnist_cnn": 256, "resnet18": 128}
SIZES = {"mnist_cnn": (20, 2, 6), "resnet18": (3, 1, 3)}  # steps of a block, of which the first don't count; rounds


def measure(model: str, folder: Path) -> list[Row]:
    """Goal 5 for a model: one device, then ddp on two; one thread a worker."""
    rows: list[Row] = []
    for layout in (["devices=1"], ["strategy=ddp", "devices=2"]):
        base = [str(OPPONENTS / "lockstep_train.py"), f"model={model}", "data=synthetic", *DATA[model], *layout]
        base += [f"batch_size={BATCH[model]}", "threads=1", "lr=0.01", f"outputs={folder}/runs"]
        commands = {"pieces": [[*base, f"pieces={PIECES}"]], "exact": [[*base, f"pieces={PIECES}", "exact=true"]]}
        alone = layout == ["devices=1"]
        if alone:
            commands["whole"] = [base]
        steps, skip, rounds = SIZES[model]
        found = play(commands, rounds, steps, skip=skip, folder=folder)
        what = f"{model}, batch {BATCH[model]}, {'one device' if alone else 'ddp on 2'}, {PIECES} pieces"
        if alone:
            goal = CUT if model == "resnet18" else None
            rows.append(row(f"{what}: against one piece", found["pieces"].blocks, found["whole"].blocks, goal))
        rows.append(
            row(f"{what}: exact=true against false", found["exact"].blocks, found["pieces"].blocks, EXACT[model])
        )
    return rows


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
    from lockstep.config import check
    from lockstep.data import open_data
    from lockstep.launch import has_computed, launch
    from lockstep.library import compose

    asked = ["model=resnet18", "data=synthetic", *DATA["resnet18"], "strategy=ddp", "devices=2", "batch_size=16"]
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

    from lockstep import logs
    from lockstep.data import DataModule
    from lockstep.training import make_module, make_trainer

    logs.configure(folder, dist.get_rank())
    profiler, first = profile(activities=[ProfilerActivity.CPU]), 3

    class Count(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == first:
                profiler.start()

        def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
            profiler.stop()

    data = DataModule(splits, config.layout, seed=config.seed, num_workers=0)
    data.process = dist.get_rank()
    trainer = make_trainer(config, folder, [Count()])
    trainer.fit(make_module(config, splits), datamodule=data)
    counted = sum(event.count for event in profiler.key_averages() if event.key == "gloo:all_reduce")
    return counted / (config.max_steps - first)
