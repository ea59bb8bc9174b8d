"""Find the fastest layout on this machine for a model, a data set and a batch size:

    python scripts/lab/advise.py model=resnet18 data=cifar10 batch_size=256
    python scripts/lab/advise.py model=resnet18 data=cifar10 batch_size=256 link=[100mbit,10gbit]  # several machines?

The program prints the facts of this machine. It then times optimizer steps on 1, 2, 4, ... devices, with 1, 2 and 4
pieces each, under ddp and dp, and names the fastest layout. If devices differ in speed, it names the `strategy.shares`
that keep all of them busy. With `link` it predicts instead the time of a step on several machines with such links (see
`scaling.py`). It takes the config of train.py and writes advise.json.
"""

import itertools
import json
import math
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import scaling
from bench import machine
from network.link import Link
from pages import add_pages

from lockstep.commands import cli
from lockstep.config.check import Config, check
from lockstep.config.pages import group_file
from lockstep.config.value_checks import PositiveFloat, checker
from lockstep.data import Splits
from lockstep.errors import UserError, WorkerFailed
from lockstep.launch.machine import available_cores, gpu_count
from lockstep.launch.parent import launch
from lockstep.programs.common.showing import markdown
from lockstep.programs.common.training import check_one_machine, open_without_test, train_quietly
from lockstep.report.summary import write_summary

ACCUMULATE = (1, 2, 4)  # pieces of each device to try
WARMUP, LEAST, MOST = 3, 5, 200  # steps of a run: first ones that don't count; fewest and most that do
ROUNDS = 2  # the layouts take turns, because the machine may slow down and recover
UNEVEN = 1.15  # suggest shares if a device is this many times as fast as the slowest


@dataclass
class Choice:
    """A layout and its measurements."""

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
        """Return the changes to a config that choose this layout."""
        layout = {"devices": self.devices, "accumulate_grad_batches": self.accumulate_grad_batches, "pieces": None}
        return layout | {"strategy": group_file("strategy", "auto" if self.devices == 1 else self.strategy)}


def advise(raw: dict[str, Any], folder: Path) -> None:
    """Measure, and print the answer."""
    seconds, link = checker(PositiveFloat)("seconds", raw.pop("seconds")), raw.pop("link")
    links = {} if link is None else scaling.links(link, raw["outputs"])
    check_one_machine("advise.py", raw)
    facts = machine.facts()
    print("\n".join(facts), flush=True)
    config = check({**raw, **Choice("auto", 1, 1, 0).changes()})
    splits = replace(open_without_test(config), val=None)
    find = partial(on_machines, links) if links else on_devices
    report = find(raw, splits, folder, seconds)
    print(report["answer"])
    write_summary(folder / "advise.json", report | {"machine": facts, "config": raw})


def on_devices(raw: dict[str, Any], splits: Splits, folder: Path, seconds: float) -> dict[str, Any]:
    """Measure this machine's layouts, each for about `seconds`."""
    config = check({**raw, **Choice("auto", 1, 1, 0).changes()})
    choices = offers(config)
    one = measure(choices[0], raw, splits, folder, WARMUP + LEAST)
    steps = enough(seconds / ROUNDS, one["seconds"])
    for choice in choices * ROUNDS:
        if choice.failed:
            continue
        print(f"measuring {choice} ...", file=sys.stderr)
        try:
            measured = measure(choice, raw, splits, folder, steps)
            choice.seconds, choice.peak_gib = min(choice.seconds or math.inf, measured["seconds"]), measured["peak_gib"]
        except (UserError, WorkerFailed) as error:
            choice.failed = str(error)
    choices.sort(key=lambda choice: choice.seconds or math.inf)
    several = [each for each in choices if each.strategy == "ddp" and each.accumulate_grad_batches > 1 and each.seconds]
    speeds: list[float] = []  # pieces per second of each device, all busy, relative to the slowest
    if several:
        largest = max(several, key=lambda choice: choice.devices)
        pieces = measure(largest, raw, splits, folder, steps, pieces=True)["pieces"]
        speeds = [max(pieces) / piece for piece in pieces]
    answer = conclusion(choices, config, speeds)
    print(table(choices))
    return {"answer": answer, "choices": [asdict(choice) for choice in choices], "speeds": speeds, "steps": steps}


def on_machines(
    links: dict[str, Link], raw: dict[str, Any], splits: Splits, folder: Path, seconds: float
) -> dict[str, Any]:
    """Measure one device with the part of a step that each of several machines would have."""
    compression = raw["strategy"].get("compression", "none")
    config = check({**raw, "devices": 1, "strategy": group_file("strategy", "auto")})

    def part(samples: int) -> scaling.Computed:
        print(f"measuring {samples} samples ...", file=sys.stderr)
        machines = config.layout.batch_size // samples
        pieces = config.layout.pieces if raw["pieces"] is None else math.ceil(config.layout.pieces / machines)
        alone, settings = Choice("single", 1, pieces, samples // pieces), {**raw, "batch_size": samples}
        first = measure(alone, settings, splits, folder, WARMUP + LEAST)
        measured = measure(alone, settings, splits, folder, enough(seconds, first["seconds"]), gradients=True)
        return scaling.Computed(measured["median"], measured["ready"], measured["sizes"])

    rows = scaling.predict(config, compression, links, part)
    print(scaling.table(rows))
    return {"answer": scaling.conclusion(rows), "machines": [asdict(row) for row in rows]}


def enough(seconds: float, step: float) -> int:
    """Return the steps of a run that lasts about `seconds`, from the seconds of a `step`."""
    return WARMUP + max(LEAST, min(MOST, int(seconds / step)))


def offers(config: Config) -> list[Choice]:
    """Return the layouts to measure: 1, 2, 4, ... devices and all, in equal pieces, one device first."""
    batch = config.layout.batch_size
    most = available_cores() if config.layout.accelerator == "cpu" else gpu_count()
    counts = sorted({most} | {1 << bit for bit in range(most.bit_length())})
    choices = []
    for devices, pieces in itertools.product(counts, ACCUMULATE):
        if batch % (devices * pieces) == 0:
            # dp can't be compiled
            names = ("single",) if devices == 1 else ("ddp",) if config.compile else ("ddp", "dp")
            choices += [Choice(name, devices, pieces, batch // (devices * pieces)) for name in names]
    return choices


def measure(
    choice: Choice, raw: dict[str, Any], splits: Splits, folder: Path, steps: int, **timed: bool
) -> dict[str, Any]:
    """Time a run of `steps` steps.

    Returns:
        `seconds` of a step (the lower quartile, because other programs on the machine only add time), the `median`,
        `peak_gib`, and the other values of the clock: with `pieces` the median seconds of one on each rank, with
        `gradients` rank zero's `ready` and `sizes`.
    """
    bare: dict[str, Any] = {"max_steps": steps, "max_epochs": steps, "val_every": None, "logger": {}}
    bare["callbacks"] = {"clock": {"_target_": "bench.clock.Clock", **timed}}
    config = check({**raw, **bare, **choice.changes()})
    run = folder / "run"
    run.mkdir()
    try:
        launch(train_quietly, config, splits, run, layout=config.layout)
        ranks = [json.loads((run / f"clock_{n}.json").read_text()) for n in range(config.layout.world_size)]
    finally:
        shutil.rmtree(run)
    return {
        "seconds": quantiles(ranks[0]["steps"][WARMUP - 1 :], n=4)[0],
        "median": median(ranks[0]["steps"][WARMUP - 1 :]),
        "peak_gib": max(rank["peak_gib"] for rank in ranks),
        "pieces": [median(rank["pieces"]) for rank in ranks if rank["pieces"]],
        "ready": ranks[0]["ready"],
        "sizes": ranks[0]["sizes"],
    }


def table(choices: list[Choice]) -> str:
    """Return the table of layouts, the fastest first."""
    rows = []
    for choice in choices:
        sizes = choice.devices, choice.accumulate_grad_batches, choice.piece
        measured = ("", "") if not choice.seconds else (f"{1000 * choice.seconds:.1f}", f"{choice.peak_gib:.2f}")
        rows.append((choice.strategy, *sizes, *measured, choice.failed or ""))
    names = ("layout", "devices", "pieces of each", "samples of a piece", "ms a step", "GiB of a process", "")
    return markdown(names, rows)


def conclusion(choices: list[Choice], config: Config, speeds: list[float]) -> str:
    """Return the best layout, its gain, and the shares for devices that differ in speed.

    Raises:
        UserError: no layout could be run.
    """
    best = choices[0]
    if best.seconds is None:
        raise UserError(f"batch_size={config.layout.batch_size}: no layout of this machine can run it: {best.failed}")
    sentences = [f"Use {best}: a step of {config.layout.batch_size} samples takes {1000 * best.seconds:.1f} ms."]
    alone = [choice.seconds for choice in choices if choice.devices == 1 and choice.seconds]
    if best.devices > 1 and alone:
        gain = min(alone) / best.seconds
        sentences.append(f"That is {gain:.2f} times as fast as one device ({1000 * min(alone):.1f} ms).")
    if speeds and max(speeds) > UNEVEN:
        shares = ",".join(f"{speed:.2g}" for speed in speeds)
        sentences.append(
            f"The {len(speeds)} devices differ in speed: strategy.shares=[{shares}] with pieces={8 * len(speeds)} or "
            "so keeps them all busy."
        )
    return " ".join(sentences)


if __name__ == "__main__":
    cli.command(advise, "advise", __file__, add_pages())
