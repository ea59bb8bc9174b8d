"""What a pipeline costs and saves, beside ddp, on this machine or on links of a limited rate:

    python scripts/pipeline.py model=resnet18 data=mnist batch_size=64 --devices 2 --pieces 2 4 8 --plot pipeline.png
    python scripts/pipeline.py model=resnet18 data=mnist batch_size=64 --devices 2 --pieces 8 --rate 200mbit

Trains the same steps on ddp and on a pipeline, in turn, `--repeats` times each, one thread a worker, and prints a
Markdown table: seconds of a step (median of all, and its ratio to ddp's), the part of it that a device waits for the
others beside the formula (S-1)/(P+S-1), what the busiest device sends in a step, and what one device holds at most:
weights and the optimizer's state, and the memory of its process. `--plot` draws times and waiting over the number of
pieces. With `--rate` each worker is a machine of its own, a network namespace whose link has that rate (Linux, root).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

sys.path.insert(1, str(Path(__file__).resolve().parent))

from showing import find_pyplot, style

ROOT = Path(__file__).resolve().parents[1]
WARMUP = 3  # steps
MIB = 1 << 20
PORT = 29511
SIDES = ("ddp", "pipeline")


class Watch(pl.Callback):
    """Each rank writes `watch_<rank>.json` into the run's folder when training ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.sent = 0
        self.start = (0.0, 0)  # seconds waited and bytes sent, after the warm-up

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plain = dist.isend

        def counted(tensor: torch.Tensor, *args: Any) -> Any:
            self.sent += tensor.nbytes
            return plain(tensor, *args)

        dist.isend = counted  # type: ignore[assignment]

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) == WARMUP:
            self.start = getattr(trainer.strategy, "waited", 0.0), self.sent

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        from lockstep.callbacks.meter import peak_gib

        own = [p for p in pl_module.parameters() if trainer.strategy.holds(p)]  # type: ignore[attr-defined]
        state = [v for each in trainer.optimizers[0].state.values() for v in each.values() if torch.is_tensor(v)]
        ends = self.ends[WARMUP - 1 :]
        steps, waited = len(ends) - 1, getattr(trainer.strategy, "waited", 0.0) - self.start[0]
        world, gradients = trainer.world_size, sum(p.nbytes for p in own)
        ring = 2 * (world - 1) / world * gradients  # by formula: all of it goes through the reducer
        found = {
            "steps": [after - before for before, after in pairwise(ends)],
            "idle": waited / (ends[-1] - ends[0]),
            "sent": (self.sent - self.start[1]) / steps if self.sent else ring,
            "held": sum(tensor.nbytes for tensor in [*own, *state]),
            "peak": peak_gib(pl_module.device) * 1024,
        }
        Path(trainer.default_root_dir, f"watch_{trainer.global_rank}.json").write_text(json.dumps(found))


@dataclass(frozen=True)
class Row:
    """A side's medians over its runs: seconds of a step, the part of it that a device waits; the most bytes that a
    device sends in a step and holds, and MiB of its process."""

    side: str
    pieces: int
    seconds: float
    idle: float
    sent: float
    held: float
    peak: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--pieces", type=int, nargs="+", default=[8])
    parser.add_argument("--steps", type=int, default=20, help=f"optimizer steps of a run, beside {WARMUP} to warm up")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rate", help="of each machine's link, in tc's words")
    parser.add_argument("--plot", type=Path, help="where to draw: a .png or .svg file")
    options, overrides = parser.parse_known_args()
    task = [
        *("accelerator=cpu", "threads=1", "callbacks=none", "+callbacks.watch._target_=pipeline.Watch", "logger=none"),
        *(f"max_steps={options.steps + WARMUP}", "max_epochs=1000000"),
        *overrides,
    ]
    found: dict[tuple[int, str], list[list[dict[str, Any]]]] = {}
    for _ in range(options.repeats):
        for pieces, side in product(options.pieces, SIDES):
            with tempfile.TemporaryDirectory() as folder:
                run([*task, f"strategy={side}", f"pieces={pieces}"], options.devices, options.rate, Path(folder))
                ranks = sorted(Path(folder).rglob("watch_*.json"))
                found.setdefault((pieces, side), []).append([json.loads(path.read_text()) for path in ranks])
    rows = [row(side, pieces, runs) for (pieces, side), runs in found.items()]
    print(table(rows, options.devices))
    if options.plot:
        draw(rows, options.devices, options.plot)


def run(task: Sequence[str], devices: int, rate: str | None, folder: Path) -> None:
    """One run of train.py on this machine, or with a worker on each of several machines."""
    path = os.pathsep.join([str(ROOT / "scripts"), str(ROOT / "src")])
    options: dict[str, Any] = {"env": {**os.environ, "PYTHONPATH": path}, "cwd": ROOT}
    command = [sys.executable, str(ROOT / "src" / "train.py"), *task]
    if rate is None:
        started = [subprocess.Popen([*command, f"devices={devices}", f"outputs={folder}"], **options)]
        ended = [process.wait() for process in started]
    else:
        with import_module("machines").Machines(devices, rate) as machines:
            meet = f"rdzv_endpoint={machines.address(0)}:{PORT}"
            each = [[*command, f"num_nodes={devices}", meet, f"outputs={folder / str(n)}"] for n in range(devices)]
            started = [machines.start(number, one, **options) for number, one in enumerate(each)]
            ended = [process.wait() for process in started]
    if any(ended):
        raise SystemExit(f"a run has failed: {' '.join(task)}")


def row(side: str, pieces: int, runs: Sequence[Sequence[Mapping[str, Any]]]) -> Row:
    ranks = [rank for each in runs for rank in each]
    seconds = statistics.median(step for rank in ranks for step in rank["steps"])
    idle = statistics.median(statistics.mean(rank["idle"] for rank in each) for each in runs)
    sent, held, peak = (max(rank[name] for rank in ranks) for name in ("sent", "held", "peak"))
    return Row(side, pieces, seconds, idle, sent, held, peak)


def bubble(pieces: int, devices: int) -> float:
    """The part of a step that a device is idle if all stages take the same time."""
    return (devices - 1) / (pieces + devices - 1)


def table(rows: Sequence[Row], devices: int) -> str:
    lines = [
        "| | pieces | step, ms | ratio | idle | formula | sent, MiB a step | held, MiB | process, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = {row.pieces: row.seconds for row in rows if row.side == SIDES[0]}
    for row in rows:
        idle = f"{row.idle:.1%} | {bubble(row.pieces, devices):.1%}" if row.side == "pipeline" else " | "
        lines.append(
            f"| {row.side}, {devices} devices | {row.pieces} | {row.seconds * 1e3:.1f} "
            f"| {row.seconds / base[row.pieces]:.2f} | {idle} "
            f"| {row.sent / MIB:.1f} | {row.held / MIB:.1f} | {row.peak:.0f} |"
        )
    return "\n".join(lines)


def draw(rows: Sequence[Row], devices: int, path: Path) -> None:
    """A step's time on both sides, and the pipeline's waiting beside its formula, over the number of pieces."""
    pyplot = find_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    pieces = sorted({row.pieces for row in rows})
    for number, side in enumerate(SIDES):
        milliseconds = {row.pieces: row.seconds * 1e3 for row in rows if row.side == side}
        left.plot(pieces, [milliseconds[each] for each in pieces], label=side, **style(number))
    idle = {row.pieces: 100 * row.idle for row in rows if row.side == "pipeline"}
    right.plot(pieces, [idle[each] for each in pieces], label="measured", **style(1))
    formula = [100 * bubble(each, devices) for each in pieces]
    right.plot(pieces, formula, label="(S-1)/(P+S-1)", **style(6))
    for axes, what in ((left, "ms a step"), (right, "per cent of a step that a device waits")):
        axes.set(xscale="log", xlabel="pieces", ylabel=what, ylim=(0, None))
        axes.set_xticks(pieces, [str(each) for each in pieces], minor=False)
        axes.minorticks_off()
        axes.legend(frameon=False)
    figure.suptitle(f"the same steps on {devices} devices: copies of the network, and a pipeline of {devices} stages")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
