"""Compare the time and traffic of several ways to sum gradients over workers:

    python scripts/lab/communication.py model=resnet18 devices=4                # through this machine's memory
    python scripts/lab/communication.py model=resnet18 devices=4 rate=200mbit   # over links of this rate, as root

The program measures a link's latency (alpha) and time per byte (beta) by ping-pong. It then sums the model's gradient
over 2, 3, ... `devices` workers by a parameter server, a ring, halving and doubling, and gloo's all-reduce
(`collectives.py`). For each it prints the bytes through the busiest worker's link, the time predicted from alpha and
beta, and the measured time. With Lockstep's exact integers all sums must have the same bits. The program writes
communication.md, .json and .png.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np
import torch
from network.collectives import SUMS
from network.link import Cost, Link, bits_per_second
from network.machines import Machines, NoMachines
from pages import add_pages
from torch.utils.data import default_collate

from lockstep.arithmetic.order import DataOrder
from lockstep.commands import cli
from lockstep.config.check import Config, check
from lockstep.config.pages import group_file
from lockstep.config.value_checks import whole_number
from lockstep.data.build import open_data
from lockstep.errors import UserError
from lockstep.job.build import make_module
from lockstep.programs.common.showing import our_pyplot, style
from lockstep.programs.common.training import check_one_machine
from lockstep.report.summary import versions, write_summary

WORKER = Path(__file__).parent / "network" / "summing.py"


@dataclass
class Row:
    """A way to sum over a number of workers. Bytes and messages are those of the busiest one; times are in seconds."""

    way: str
    workers: int
    messages: int
    bytes: int
    cost: Cost
    predicted: float
    measured: float
    spread: tuple[float, float]  # quartiles


def communicate(raw: dict[str, Any], folder: Path) -> None:
    """Measure, and write the table and the plot."""
    rate, rounds = raw.pop("rate"), whole_number(2)("rounds", raw.pop("rounds"))
    if rate is not None:
        bits_per_second("rate", rate)
    check_one_machine("communication.py", raw)
    config = check(raw | {"strategy": group_file("strategy", "ddp"), "batch_size": raw["devices"] * raw["batch_size"]})
    workers = config.layout.devices
    if workers < 2:
        raise UserError(f"devices={workers} is too few workers: use devices=2 or more")
    with ExitStack() as stack:
        machines = None
        if rate is not None:
            try:
                machines = stack.enter_context(Machines(workers))
            except NoMachines as error:
                raise UserError(f"rate={rate}: this system can't limit links: {error}") from None
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        size = gradients(config, place)
        checks = run("check", place, workers, rounds, machines)
        if machines:
            machines.burst = min(max(size // workers // 32, 16_384), 131_072)
            machines.limit(rate)
        results = run("measure", place, workers, rounds, machines)
    control = judged(checks)
    link = Link.fitted(results[0]["pings"], results[0]["adding"])
    rows = []
    for count, sums in enumerate((each["sums"] for each in results), start=2):
        for way, row in sums.items():
            cost = link.cost(way, count, size)
            low, mid, high = quantiles(row["seconds"], n=4)
            rows.append(Row(way, count, row["messages"], row["bytes"], cost, cost.seconds, mid, (low, high)))
    title = f"{raw['model']['name']}: a gradient of {size / 1e6:.1f} MB; links: {rate or 'the memory of one machine'}"
    text = "\n".join([title + ".", "", report(link, rows), "", control, ""])
    print(text)
    (folder / "communication.md").write_text(text)
    draw(rows, folder / "communication.png", title)
    facts = {"bytes": size, "rate": rate, "link": asdict(link), "rows": [asdict(row) for row in rows]}
    write_summary(folder / "communication.json", facts | {"checks": checks, "versions": versions()})


def gradients(config: Config, folder: Path) -> int:
    """Write each worker's gradient of the model's loss over its own samples. Return the bytes of one."""
    splits = open_data(config.data, config.data_dir, config.seed)
    module = make_module(config, splits).train()
    order, size = DataOrder(len(splits.train), config.layout, config.seed), config.layout.piece_size
    for rank in range(config.layout.devices):
        step = order.step(0, 0)[rank * size : (rank + 1) * size]
        x, y = default_collate([splits.train[index] for index in step])[:2]
        module.zero_grad()
        loss: Any = module.training_step((x / 255 if x.dtype == torch.uint8 else x, y), 0)
        (loss["loss"] if isinstance(loss, dict) else loss).backward()
        flat = torch.cat([p.grad.flatten().float() for p in module.parameters() if p.grad is not None])
        np.save(folder / f"gradient_{rank}.npy", flat.numpy())
    return flat.nbytes


def run(what: str, folder: Path, workers: int, rounds: int, machines: Machines | None) -> list[dict[str, Any]]:
    """Start the workers, each on its own machine if `machines` are given, and return their results.

    Raises:
        RuntimeError: a worker failed.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"{machines.address(0) if machines else '127.0.0.1'}:{free.getsockname()[1]}"
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "eth0" if machines else "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # hides warnings about addresses without names
    }
    processes: list[subprocess.Popen[Any]] = []
    try:
        for rank in range(workers):
            program = [sys.executable, str(WORKER), what, *map(str, (folder, rank, workers, endpoint, rounds))]
            command = machines.command(rank, program) if machines else program
            processes.append(subprocess.Popen(command, env=environment))
        for rank, process in enumerate(processes):
            if code := process.wait():
                raise RuntimeError(f"worker {rank} of {workers} ended with exit code {code}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results: list[dict[str, Any]] = json.loads((folder / f"{what}.json").read_text())
    return results


def judged(checks: list[dict[str, int]]) -> str:
    """Return a sentence on the bits of the sums over 2 workers and more.

    Raises:
        RuntimeError: exact sums differ, or the check did not detect sums that differ.
    """
    for workers, counts in enumerate(checks, start=2):
        if counts["exact"] != 1:
            raise RuntimeError(
                f"{workers} workers: exact integers gave {counts['exact']} different sums: there must be one"
            )
        if counts["wrong"] == 1 or (workers > 2 and counts["float"] == 1):
            raise RuntimeError(f"{workers} workers: the check of bits did not detect sums that differ: {counts}")
    sentence = (
        "With exact integers all ways gave the same bits on all workers, and so did one process that adds all; the "
        "check detected a missing number"
    )
    more = f"; with float32 {len(checks) + 1} workers got {checks[-1]['float']} different sums" * (len(checks) > 1)
    return f"{sentence}{more}."


def report(link: Link, rows: list[Row]) -> str:
    """Return the results as Markdown."""
    low, high = link.spread
    lines = [
        f"A message of n bytes takes {1e6 * link.alpha:.0f} us + n x {1e9 * link.beta:.2f} ns "
        f"({link.mbit:,.0f} Mbit/s); "
        f"the middle half of those measured took {low:.2f} to {high:.2f} times that.",
        "",
        "| workers | way | messages | busiest link, MB | predicted, ms | of it incast | measured, ms (quartiles) "
        "| predicted / measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        predicted = f"{milliseconds(row.predicted)} | {milliseconds(row.cost.incast)}"
        quartiles = " to ".join(map(milliseconds, row.spread))
        measured = f"{milliseconds(row.measured)} ({quartiles}) | {row.predicted / row.measured:.2f}"
        lines.append(
            f"| {row.workers} | {row.way} | {row.messages} | {row.bytes / 1e6:.1f} | {predicted} | {measured} |"
        )
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.{0 if seconds >= 0.1 else 1}f}"


def draw(rows: list[Row], path: Path, title: str) -> None:
    """Plot measured and predicted times over the number of workers."""
    figure, axes = our_pyplot().subplots(figsize=(8, 5))
    for number, way in enumerate(SUMS):
        mine = [row for row in rows if row.way == way]
        counts = [row.workers for row in mine]
        look = style(number)
        axes.plot(counts, [row.measured for row in mine], label=way, **(look | {"linestyle": "-"}))
        dashed = {"color": look["color"], "linestyle": "--", "linewidth": 1}
        axes.plot(counts, [row.predicted for row in mine], **dashed)
    axes.set(xlabel="workers", ylabel="seconds (dashed: predicted)", title=title, ylim=(0, None), xticks=counts)
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    cli.command(communicate, "communication", __file__, add_pages())
