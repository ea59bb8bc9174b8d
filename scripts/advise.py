"""Which layout is fastest on this machine for a model, a data set and a batch size, and why:

    python scripts/advise.py model=resnet18 data=cifar10 batch_size=256
    python scripts/advise.py model=mnist_cnn batch_size=256 verify=all   # prediction and measurement of every layout

It measures steps that send nothing, with 1, 2, 4, ... workers busy at once (they share caches and memory), in a few
sizes of a piece, and the all-reduce of tensors of several sizes. A layout's step is then predicted as its computation
plus, under ddp, a ring all-reduce: latency + 2 (N - 1) / N x bytes / bandwidth (Patarasuk and Yuan, Bandwidth optimal
all-reduce algorithms, 2009). Sending is taken to overlap with nothing. The best are run, and the best
on one device, which tells how far the prediction is off. Takes the config of train.py; writes advise.json.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from advice.answer import conclusion, table
from advice.measurement import compute, run
from advice.prediction import Machine, predict
from rich.console import Console

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.agent import launch
from lockstep.launch.environment import external_workers
from lockstep.launch.machine import cores, gpu_count
from lockstep.loading import open_data
from lockstep.run import cli
from lockstep.run.checks import real, whole
from lockstep.run.config import check
from lockstep.run.summary import versions, write_summary

ACCUMULATE = (1, 2, 4)  # what is offered to each device


def advise(raw: dict[str, Any], folder: Path) -> None:
    """Measures, predicts, verifies, and answers."""
    started = time.perf_counter()
    most = None if (verify := raw.pop("verify")) == "all" else whole(1)("verify", verify)
    seconds = real(above=0)("seconds", raw.pop("seconds"))
    assert seconds is not None
    if external_workers() or raw["num_nodes"] != 1:
        raise Refusal("advise measures one machine, without torchrun")
    raw |= {"accumulate_grad_batches": None, "pieces": None, "devices": 1, "strategy": {"name": "auto"}}
    config = check(raw)
    if (load := os.getloadavg()[0]) > cores() / 4:
        print(f"other programs are busy here (load {load:.1f} on {cores()} cores): expect errors", file=sys.stderr)
    splits = open_data(config.data, config.data_dir, config.seed)
    machine = Machine({}, {}, {}, 0)
    offered = offers(raw["batch_size"], config.layout.accelerator)
    for devices in sorted({devices for devices, _ in offered}):
        turns = [accumulate for n, accumulate in offered if n == devices]
        if devices == 1:  # dp's pieces are computed one after the other, on a CPU
            turns.append(max(n * accumulate for n, accumulate in offered))
        asked = check({**raw, **layout("auto", devices, turns[0])})
        print(f"measuring {devices} at once ...", file=sys.stderr)
        times, peaks, sends, size = launch(
            compute, asked, splits, folder, sorted({turns[0], turns[-1]}), seconds, layout=asked.layout
        )
        machine.compute[devices], machine.all_reduce[devices], machine.gradients = times, sends, size
        machine.peak |= peaks
    choices = sorted(predict(raw["batch_size"], offered, config, machine), key=lambda choice: choice.predicted)
    if not choices:
        raise Refusal(f"batch_size={raw['batch_size']}: no layout of this machine holds it")
    wanted = choices[:most]
    if not any(choice.devices == 1 for choice in wanted):  # what the answer compares with is measured too
        wanted += [choice for choice in choices if choice.devices == 1][:1]
    for choice in wanted:
        print(f"running {choice} ...", file=sys.stderr)
        asked = check({**raw, **layout(choice.strategy, choice.devices, choice.accumulate_grad_batches)})
        choice.measured = launch(run, asked, splits, folder, seconds, layout=asked.layout)
    console = Console()
    if not console.is_terminal:
        console.width = 120
    console.print(table(choices, config))
    answer = conclusion(choices, machine, config)
    print(answer)
    report = {
        "answer": answer,
        "choices": [asdict(choice) | {"predicted": choice.predicted, "error": choice.error} for choice in choices],
        "compute": machine.compute,
        "peak_mib": machine.peak,
        "all_reduce": machine.all_reduce,
        "ring": {n: machine.ring(n) for n in machine.all_reduce if n > 1},
        "gradient_bytes": machine.gradients,
        "seconds": time.perf_counter() - started,
        "config": raw,
        "versions": versions(),
    }
    write_summary(folder / "advise.json", report)


def layout(strategy: str, devices: int, accumulate: int) -> dict[str, Any]:
    """The keys of a config that choose a layout."""
    name = "auto" if devices == 1 else "ddp" if strategy == "auto" else strategy
    return {"strategy": {"name": name}, "devices": devices, "accumulate_grad_batches": accumulate}


def offers(batch_size: int, accelerator: str) -> list[tuple[int, int]]:
    """`(devices, turns of each)` whose pieces are equal: 1, 2, 4, ... devices and all of them."""
    most = cores() if accelerator == "cpu" else gpu_count()
    counts = sorted({most} | {1 << bit for bit in range(most.bit_length())})
    return [(n, a) for n, a in itertools.product(counts, ACCUMULATE) if batch_size % (n * a) == 0]


if __name__ == "__main__":
    cli.command(advise, "advise")
