"""Who talks to whom when gradients are summed over workers, and what it costs:

    python scripts/communication.py model=resnet18 devices=4                # on this machine's memory
    python scripts/communication.py model=resnet18 devices=4 rate=200mbit   # on links as slow as that, as root

Measures a link's latency (alpha) and time per byte (beta) by ping-pong, then sums the model's own gradient over 2, 3,
... `devices` workers by a parameter server, a ring, halving and doubling, and gloo's own all-reduce: `collectives.py`.
Prints for each the bytes through the busiest worker, the time that alpha and beta predict, and the one measured. All
must give the same sum: bit for bit, of Lockstep's exact integers. Writes communication.md, .json and .png.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
import torch.distributed as dist
from collectives import SUMS, Wire
from machines import Machines, NoMachines
from showing import find_pyplot, style
from torch import Tensor
from torch.utils.data import default_collate

from lockstep.arithmetic.exact import ExactSum
from lockstep.arithmetic.layout import Refusal
from lockstep.arithmetic.order import DataOrder
from lockstep.run import cli
from lockstep.run.build import make_module
from lockstep.run.checks import whole
from lockstep.run.config import Config, check
from lockstep.run.opening import open_data
from lockstep.run.summary import versions, write_summary

PING_BYTES = [1 << bit for bit in range(6, 23, 2)]  # 64 B to 4 MiB
PINGS = 15  # of each size
PORT = 29511


# --- a worker ---------------------------------------------------------------------------------------------------------


def work(folder: Path, rank: int, workers: int, address: str, rounds: int) -> None:
    """One of `workers`; rank zero leaves what was measured in `folder`/found.json."""
    torch.set_num_threads(1)
    store = dist.TCPStore(address, PORT, workers, is_master=rank == 0, timeout=timedelta(minutes=2))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=timedelta(minutes=5))
    gradient = torch.from_numpy(np.load(folder / f"gradient_{rank}.npy"))
    found: dict[str, Any] = {"pings": pings() if workers == 2 else [], "adding": adding(gradient), "sums": {}}
    exact = {name: exact_sum(gradient, add) for name, add in SUMS.items()}
    for _ in range(rounds):
        for name, add in SUMS.items():
            row = found["sums"].setdefault(name, {"seconds": []})
            row |= timed(add, gradient.clone(), row["seconds"])
    same = [None] * workers
    dist.all_gather_object(same, [value.numpy().tobytes() for value in exact.values()])
    if rank == 0:
        # The control: in float32 the order of the additions shows.
        found["same"] = len({bits for worker in same for bits in worker or ()}) == 1
        found["floats"] = len({tensor.numpy().tobytes() for tensor in floats(gradient)})
        (folder / "found.json").write_text(json.dumps(found))
    else:
        list(floats(gradient))
    dist.barrier()
    dist.destroy_process_group()


def pings() -> list[tuple[int, float]]:
    """(bytes, seconds one way) of messages that worker 1 sends back."""
    other, found = 1 - dist.get_rank(), []
    for size in PING_BYTES * PINGS:
        message = torch.zeros(size, dtype=torch.uint8)
        began = time.perf_counter()
        for sends in (dist.get_rank() == 0, dist.get_rank() == 1):
            if sends:
                dist.send(message, other)
            else:
                dist.recv(message, other)
        found.append((size, (time.perf_counter() - began) / 2))
    return found


def adding(vector: Tensor) -> float:
    """Seconds per byte of adding one vector to another."""
    total, times = torch.zeros_like(vector), []
    for _ in range(5):
        began = time.perf_counter()
        total += vector
        times.append(time.perf_counter() - began)
    return median(times) / vector.nbytes


def timed(add: Callable[[Tensor, Wire], None], vector: Tensor, before: list[float]) -> dict[str, Any]:
    """Seconds until the last worker has the sum, after those of `before`; bytes of the busiest worker."""
    wire = Wire()
    dist.barrier()
    began = time.perf_counter()
    add(vector, wire)
    told = torch.tensor([time.perf_counter() - began, wire.sent + wire.received, wire.messages], dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    seconds, busiest, messages = told.tolist()
    return {"seconds": [*before, seconds], "bytes": int(busiest), "messages": int(messages)}


def exact_sum(gradient: Tensor, add: Callable[[Tensor, Wire], None]) -> Tensor:
    """The gradient summed as `exact=true` does, with the integers summed by `add`."""

    def all_reduce(tensor: Tensor, op: str) -> None:
        if op == "sum":
            add(tensor, Wire())
        else:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)

    exact = ExactSum([gradient])
    exact.begin()
    exact.add([gradient])
    return exact.total(all_reduce)[0]


def floats(gradient: Tensor) -> Iterator[Tensor]:
    for add in SUMS.values():
        vector = gradient.clone()
        add(vector, Wire())
        yield vector


# --- their parent -----------------------------------------------------------------------------------------------------


@dataclass
class Link:
    """What a message of n bytes takes: alpha + beta n seconds. `spread`: quartiles of measured over fitted."""

    alpha: float
    beta: float
    spread: tuple[float, float]

    @classmethod
    def fitted(cls, pings: list[tuple[int, float]]) -> Link:
        """By least squares of relative errors, of each size's median."""
        sizes = sorted({size for size, _ in pings})
        times = [median(seconds for at, seconds in pings if at == size) for size in sizes]
        weights = 1 / np.array(times)
        terms = np.stack([np.ones(len(sizes)), np.array(sizes)], axis=1) * weights[:, None]
        alpha, beta = np.maximum(np.linalg.lstsq(terms, np.ones(len(sizes)), rcond=None)[0], 0).tolist()
        ratios = [seconds / (alpha + beta * size) for size, seconds in pings]
        low, _, high = quantiles(ratios, n=4)
        return cls(alpha, beta, (low, high))

    def predicted(self, name: str, workers: int, size: int, adding: float) -> float:
        """Seconds of a sum of `size` bytes over `workers`; `adding` in seconds per byte."""
        n, k, log = workers, size, workers.bit_length() - 1
        extra = n > 1 << log  # no power of two
        paired = 1 << log
        share = (paired - 1) / paired
        return {
            # Its link carries the vectors of N - 1 at once, in, then out.
            "parameter server": 2 * self.alpha + 2 * (n - 1) * self.beta * k + (n - 1) * adding * k,
            "ring": 2 * (n - 1) * (self.alpha + self.beta * k / n) + (n - 1) / n * adding * k,
            "halving and doubling": 2 * log * self.alpha
            + 2 * share * self.beta * k
            + share * adding * k
            + extra * (2 * self.alpha + 2 * self.beta * k + adding * k),
            "gloo's all-reduce": 2 * (n - 1) * (self.alpha + self.beta * k / n) + (n - 1) / n * adding * k,
        }[name]


@dataclass
class Row:
    """A way to sum, over so many workers; bytes through the busiest one, in and out."""

    way: str
    workers: int
    messages: int
    bytes: int
    predicted: float
    measured: float
    spread: tuple[float, float]


def communicate(raw: dict[str, Any], folder: Path) -> None:
    """Measures, and writes the table and the plot."""
    rate = raw.pop("rate")
    rounds = whole(2)("rounds", raw.pop("rounds"))
    config = check(raw | {"strategy": {"name": "ddp"}, "batch_size": raw["devices"] * raw["batch_size"]})
    workers = config.layout.devices
    if workers < 2 or config.layout.num_nodes > 1:
        raise Refusal("devices: 2 or more workers of one machine, of which all numbers up to it are tried")
    size = gradients(config, folder)
    rows, link = [], None
    for count in range(2, workers + 1):
        found = measured(folder, count, rate, rounds)
        if not found["same"]:
            raise RuntimeError(f"{count} workers: the ways to sum differ in bits")
        link = link or Link.fitted(found["pings"])
        for way, row in found["sums"].items():
            low, mid, high = quantiles(row["seconds"], n=4)
            predicted = link.predicted(way, count, size, found["adding"])
            rows.append(Row(way, count, row["messages"], row["bytes"], predicted, mid, (low, high)))
    assert link is not None
    text = report(config, size, rate, link, rows)
    print(text)
    (folder / "communication.md").write_text(text)
    draw(rows, folder / "communication.png", f"{config.name}: {size / 1e6:.1f} MB, {rate or 'loopback'}")
    facts = {"bytes": size, "rate": rate, "link": asdict(link), "rows": [asdict(row) for row in rows]}
    write_summary(folder / "communication.json", facts | {"versions": versions()})


def gradients(config: Config, folder: Path) -> int:
    """Leaves each worker's gradient of the model's loss, over samples of its own; returns the bytes of one."""
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


def measured(folder: Path, workers: int, rate: str | None, rounds: int) -> dict[str, Any]:
    """What `workers` processes found, on machines of their own where their links have a rate."""
    with ExitStack() as stack:
        machines = None
        if rate is not None:
            try:
                machines = stack.enter_context(Machines(workers, rate))
            except NoMachines as error:
                raise Refusal(f"rate={rate}: links can't be limited here: {error}") from None
        processes = []
        for rank in range(workers):
            address = machines.address(0) if machines else "127.0.0.1"
            asked = [sys.executable, __file__, "--worker", *map(str, (folder, rank, workers, address, rounds))]
            interface = os.environ | {
                "GLOO_SOCKET_IFNAME": "eth0" if machines else "lo",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # else it tells that addresses have no names
            }
            command = machines.command(rank, asked) if machines else asked
            processes.append(subprocess.Popen(command, env=interface))
        stack.callback(lambda: [process.kill() for process in processes])
        for rank, process in enumerate(processes):
            if code := process.wait():
                raise RuntimeError(f"worker {rank} of {workers} ended with exit code {code}")
    return json.loads((folder / "found.json").read_text())


def report(config: Config, size: int, rate: str | None, link: Link, rows: list[Row]) -> str:
    """Markdown for people."""
    low, high = link.spread
    where = rate or "this machine's memory"
    mbit = 8 / link.beta / 1e6 if link.beta else float("inf")
    lines = [
        f"{config.name}: a gradient of {size / 1e6:.1f} MB; links: {where}. A message of n bytes takes "
        f"{1e6 * link.alpha:.0f} us + n x {1e9 * link.beta:.2f} ns ({mbit:,.0f} Mbit/s); of those measured, the middle "
        f"half took {low:.2f} to {high:.2f} times that.",
        "",
        "| workers | way | messages | busiest worker, MB | predicted, ms | measured, ms (quartiles) | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        quartiles = " to ".join(f"{1000 * seconds:.1f}" for seconds in row.spread)
        sides = f"{1000 * row.predicted:.1f} | {1000 * row.measured:.1f} ({quartiles})"
        ratio = row.measured / row.predicted
        lines.append(f"| {row.workers} | {row.way} | {row.messages} | {row.bytes / 1e6:.1f} | {sides} | {ratio:.2f} |")
    return "\n".join([*lines, "", "All ways gave the same bits, of exact integers, on all workers.", ""])


def draw(rows: list[Row], path: Path, title: str) -> None:
    """Measured and predicted times by the number of workers."""
    figure, axes = find_pyplot().subplots(figsize=(8, 5), layout="constrained")
    for number, way in enumerate(SUMS):
        mine = [row for row in rows if row.way == way]
        counts = [row.workers for row in mine]
        look = style(number)
        axes.plot(counts, [1000 * row.measured for row in mine], label=way, **(look | {"linestyle": "-"}))
        dashed = {"color": look["color"], "linestyle": "--", "linewidth": 1}
        axes.plot(counts, [1000 * row.predicted for row in mine], **dashed)
    axes.set(xlabel="workers", ylabel="ms (dashed: predicted)", title=title, ylim=(0, None), xticks=counts)
    axes.legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        folder, rank, workers, address, rounds = sys.argv[2:]
        work(Path(folder), int(rank), int(workers), address, int(rounds))
    else:
        cli.command(communicate, "communication")
