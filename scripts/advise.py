"""Which layout is fastest on this machine for a model, a data set and a batch size:

    python scripts/advise.py model=resnet18 data=cifar10 batch_size=256

Says what this machine is, and what is wrong with it; then makes some optimizer steps on 1, 2, 4, ... devices, with 1, 2
and 4 pieces each, under ddp and dp, and names the fastest layout. Where devices differ in speed it names the
`strategy.shares` that keep them all busy. Takes the config of train.py; writes advise.json.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import machine
from rich import box
from rich.table import Table
from showing import wide_console

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.agent import WorkerFailed, launch
from lockstep.launch.environment import external_workers
from lockstep.launch.machine import cores, gpu_count
from lockstep.loading import Splits
from lockstep.run import cli
from lockstep.run.checks import real
from lockstep.run.config import Config, check
from lockstep.run.opening import open_data
from lockstep.run.summary import write_summary
from lockstep.run.training import train

ACCUMULATE = (1, 2, 4)  # what is offered to each device
WARMUP, LEAST, MOST = 3, 5, 200  # steps of a run: left out; counted
ROUNDS = 2  # in turns, since the machine may slow down and recover
UNEVEN = 1.15  # times as fast as the slowest device, from which on shares are named


@dataclass
class Choice:
    """A layout, and what was measured of it."""

    strategy: str
    devices: int
    accumulate_grad_batches: int
    piece: int  # samples
    seconds: float | None = None  # of an optimizer step
    peak_gib: float | None = None  # of the largest process
    failed: str | None = None

    def __str__(self) -> str:
        name = "auto" if self.devices == 1 else self.strategy
        return f"strategy={name} devices={self.devices} accumulate_grad_batches={self.accumulate_grad_batches}"

    def changes(self) -> dict[str, Any]:
        """To a config, which choose this layout."""
        layout = {"devices": self.devices, "accumulate_grad_batches": self.accumulate_grad_batches, "pieces": None}
        return layout | {"strategy": {"name": "auto" if self.devices == 1 else self.strategy}}


def advise(raw: dict[str, Any], folder: Path) -> None:
    """Measures, and answers."""
    seconds = real(above=0)("seconds", raw.pop("seconds"))
    if external_workers() or raw["num_nodes"] != 1:
        raise Refusal("advise measures one machine, without torchrun")
    facts, problems = machine.facts(), machine.problems()
    print("\n".join([*facts, *(f"wrong: {problem}" for problem in problems)]), flush=True)
    config = check({**raw, **Choice("auto", 1, 1, 0).changes()})
    splits = replace(open_data(config.data, config.data_dir, config.seed), val=None, test=None)
    choices = offers(config)
    one = measure(choices[0], raw, splits, folder, WARMUP + LEAST)
    steps = WARMUP + max(LEAST, min(MOST, int(seconds / ROUNDS / one["seconds"])))
    for choice in choices * ROUNDS:
        if choice.failed:
            continue
        print(f"measuring {choice} ...", file=sys.stderr)
        try:
            found = measure(choice, raw, splits, folder, steps)
            choice.seconds, choice.peak_gib = min(choice.seconds or math.inf, found["seconds"]), found["peak_gib"]
        except (Refusal, WorkerFailed) as error:
            choice.failed = str(error)
    choices.sort(key=lambda choice: choice.seconds or math.inf)
    several = [each for each in choices if each.strategy == "ddp" and each.accumulate_grad_batches > 1 and each.seconds]
    speeds: list[float] = []  # of all devices at once, in pieces, against the slowest's
    if several:
        pieces = measure(max(several, key=lambda choice: choice.devices), raw, splits, folder, steps, True)["pieces"]
        speeds = [max(pieces) / piece for piece in pieces]
    answer = conclusion(choices, config, speeds)
    wide_console(120).print(table(choices))
    print(answer)
    measured = {"choices": [asdict(choice) for choice in choices], "speeds": speeds, "steps": steps}
    report = {"answer": answer, "machine": facts, "problems": problems, **measured, "config": raw}
    write_summary(folder / "advise.json", report)


def offers(config: Config) -> list[Choice]:
    """What is measured: 1, 2, 4, ... devices and all of them, in equal pieces; one device first."""
    batch = config.layout.batch_size
    most = cores() if config.layout.accelerator == "cpu" else gpu_count()
    counts = sorted({most} | {1 << bit for bit in range(most.bit_length())})
    found = []
    for devices, pieces in itertools.product(counts, ACCUMULATE):
        if batch % (devices * pieces) == 0:
            # dp can't be compiled
            names = ("single",) if devices == 1 else ("ddp",) if config.compile else ("ddp", "dp")
            found += [Choice(name, devices, pieces, batch // (devices * pieces)) for name in names]
    return found


def measure(
    choice: Choice, raw: dict[str, Any], splits: Splits, folder: Path, steps: int, pieces: bool = False
) -> dict[str, Any]:
    """A run of so many steps: `seconds` of a step, the lower quartile, since what else runs on the machine only adds;
    `peak_gib`; `pieces`, the median seconds of one on each rank, where they are asked for."""
    bare: dict[str, Any] = {"max_steps": steps, "max_epochs": steps, "val_every": None, "logger": {}}
    bare["callbacks"] = {"clock": {"_target_": "clock.Clock", "pieces": pieces}}
    config = check({**raw, **bare, **choice.changes()})
    run = folder / "run"
    run.mkdir()
    try:
        launch(_work, config, splits, run, layout=config.layout)
        ranks = [json.loads((run / f"clock_{n}.json").read_text()) for n in range(config.layout.world_size)]
    finally:
        shutil.rmtree(run)
    return {
        "seconds": quantiles(ranks[0]["steps"][WARMUP - 1 :], n=4)[0],
        "peak_gib": max(rank["peak_gib"] for rank in ranks),
        "pieces": [median(rank["pieces"]) for rank in ranks] if pieces else None,
    }


def _work(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    logging.disable(logging.WARNING)  # the table says it all
    return train(config, splits, folder)


def table(choices: list[Choice]) -> Table:
    """The layouts, the fastest first."""
    names = ("layout", "devices", "pieces of each", "samples of a piece", "ms a step", "GiB of a process", "")
    shown = Table(*names, box=box.SIMPLE_HEAD)
    for choice in choices:
        sizes = map(str, (choice.devices, choice.accumulate_grad_batches, choice.piece))
        measured = [] if choice.seconds is None else [f"{1000 * choice.seconds:.1f}", f"{choice.peak_gib:.2f}"]
        shown.add_row(choice.strategy, *sizes, *(measured or ("", "")), choice.failed or "")
    return shown


def conclusion(choices: list[Choice], config: Config, speeds: list[float]) -> str:
    """Which layout, how much it gains, and the shares of devices that differ.

    Raises:
        Refusal: no layout could be run.
    """
    best = choices[0]
    if best.seconds is None:
        raise Refusal(f"batch_size={config.layout.batch_size}: no layout of this machine can run it: {best.failed}")
    said = [f"Use {best}: a step of {config.layout.batch_size} samples takes {1000 * best.seconds:.1f} ms."]
    alone = [choice.seconds for choice in choices if choice.devices == 1 and choice.seconds]
    if best.devices > 1 and alone:
        gain = min(alone) / best.seconds
        said.append(f"That is {gain:.2f} times as fast as one device ({1000 * min(alone):.1f} ms).")
    if speeds and max(speeds) > UNEVEN:
        shares = ",".join(f"{speed:.2g}" for speed in speeds)
        said.append(
            f"The {len(speeds)} devices differ in speed: strategy.shares=[{shares}] with pieces={8 * len(speeds)} or "
            "so keeps them all busy."
        )
    return " ".join(said)


if __name__ == "__main__":
    cli.command(advise, "advise")
