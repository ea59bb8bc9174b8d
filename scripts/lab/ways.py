"""Compare the cost of several ways to run, on this machine or over links of a limited rate:

    python scripts/lab/ways.py 'strategy=ddp' 'strategy=pipeline' -- model=resnet18 data=mnist pieces=8
    python scripts/lab/ways.py strategy=ddp 'strategy=ddp extras=[late]' --rate 50mbit --rate 200mbit -- data=synthetic

A way is a string of overrides of train.py; overrides after `--` apply to all. The ways take turns, `--rounds` times,
with one thread per worker. A Markdown table has medians of a step and of a sample, samples per second relative to the
first way, the part of the time that a pipeline's stage waits for others, the bytes that a worker sends, the largest
worker's weights and optimizer state, and the memory of its process. With `--rate` each worker has a network namespace
with a link of that rate (Linux, as root). Exit codes: 0 measured, 1 a run failed, 2 bad input.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "src"))

from network.link import bits_per_second
from network.machines import Machines, NoMachines
from repository import ROOT

from lockstep.errors import UserError
from lockstep.report.summary import summary_of

MIB = 1 << 20
PORT = 29501
COLUMNS = ["link", "way", "ms a step", "its samples", "ms a sample (quartiles)", "samples per second, of the first's"]
COLUMNS += ["waits", "sent, MiB a step", "held, MiB", "process, MiB"]


@dataclass
class Way:
    """Overrides, and their measurements: seconds of each step, and the clocks of each run's workers (bench.clock)."""

    overrides: str
    samples: int = 0  # of a step
    steps: list[float] = field(default_factory=list)
    runs: list[list[dict[str, Any]]] = field(default_factory=list)

    def row(self, link: str, first: "Way") -> str:
        low, mid, high = (1000 * each / self.samples for each in quantiles(self.steps, n=4))
        gain = median(first.steps) / first.samples / median(self.steps) * self.samples
        waits = median(mean(worker["waits"] for worker in run) for run in self.runs)
        sent, stored, peak = (
            max(worker[name] for run in self.runs for worker in run) for name in ("sent", "held", "peak_gib")
        )
        cells = (
            *(link, f"`{self.overrides}`", f"{1000 * median(self.steps):.0f}", self.samples),
            *(f"{mid:.2f} ({low:.2f} to {high:.2f})", f"{gain:.2f}", f"{waits:.1%}" if waits else ""),
            *(f"{sent / MIB:.1f}" if sent else "", f"{stored / MIB:.1f}", f"{1024 * peak:.0f}"),
        )
        return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="+", help="overrides of each way, in quotes; overrides after -- apply to all")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument(
        "--rate", action="append", help="rate of each machine's link in tc's notation, such as 200mbit; may be repeated"
    )
    parser.add_argument("--burst", type=int, default=32_768, help="bytes that an idle link passes at once")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each run")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options, everywhere = parser.parse_args(arguments[:at]), arguments[at + 1 :]
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    try:
        for rate in options.rate or [None]:
            with ExitStack() as stack:
                machines = None
                if rate:
                    bits_per_second("--rate", rate)
                    machines = stack.enter_context(Machines(options.devices, rate, options.burst))
                ways = [Way(overrides) for overrides in options.ways]
                for way in ways * options.rounds:
                    with tempfile.TemporaryDirectory() as folder:
                        run(way, everywhere, options, machines, Path(folder))
                print(*(way.row(rate or "this machine", ways[0]) for way in ways), sep="\n", flush=True)
    except (NoMachines, UserError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2
    return 0


def run(way: Way, everywhere: list[str], options: argparse.Namespace, machines: Machines | None, folder: Path) -> None:
    """Run a way once: on this machine, or as one rank on each of several machines.

    Raises:
        RuntimeError: the run failed.
    """
    warmup = 12 if "powersgd" in way.overrides else 3  # PowerSGD sends whole gradients in the first ten steps
    steps = warmup + options.steps
    program = [
        sys.executable,
        "src/train.py",
        "accelerator=cpu",
        "threads=1",
        f"max_steps={steps}",
        "max_epochs=1000000",
    ]
    program += ["val_every=1000000", "logger=none", "callbacks=none", "+callbacks.clock._target_=bench.clock.Clock"]
    program += [*everywhere, *way.overrides.split()]
    if machines is None:
        commands = [[*program, f"devices={options.devices}", f"outputs={folder}/0"]]
    else:
        commands = [
            machines.rank(index, [*program, f"outputs={folder}/{index}"], PORT) for index in range(options.devices)
        ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'scripts' / 'lab'}"}
    with (folder / "log").open("w+") as log:
        started = [subprocess.Popen(each, cwd=ROOT, env=environment, stdout=log, stderr=log) for each in commands]
        codes = [process.wait() for process in started]
        if any(codes):
            log.seek(0)
            raise RuntimeError(f"{way.overrides}: a run failed: {(log.read().splitlines() or ['no output'])[-1]}")
    clocks = [json.loads(path.read_text()) for path in sorted(folder.rglob("clock_*.json"))]
    way.samples = max(summary_of(path.parent)["layout"]["batch_size"] for path in folder.rglob("summary.json"))
    way.steps += [seconds for clock in clocks for seconds in clock["steps"][warmup:]]
    way.runs.append(clocks)


if __name__ == "__main__":
    sys.exit(main())
