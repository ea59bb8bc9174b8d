"""What saves a run that waits for its link: whole runs on machines whose links are limited, in turns (Linux, as root).

    python scripts/bench/links.py --rate 100mbit --rate 1gbit model=mnist_cnn data=synthetic batch_size=128

Runs strategy=ddp on so many machines with one device each: plain, with other sums on the wire, and accumulating, which
sends once for more samples. A ratio is plain's median seconds per sample over that way's, over rounds in which all take
turns; what follows the script's own options goes to every run. Exit codes: 0 measured, 1 a run failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1]))

from link import bits_per_second
from machines import Machines, NoMachines

from lockstep.arithmetic.layout import Refusal
from lockstep.run.checks import ROOT

WAYS = {
    "ddp": "",
    "strategy.compression=bf16": "strategy.compression=bf16",
    "strategy.compression=powersgd": "strategy.compression=powersgd",
    "late=1": "late=1",
    "accumulate_grad_batches=4": "accumulate_grad_batches=4",  # and 4 times the batch_size
}
PLAIN = "ddp"
WARMUP = 12  # steps that don't count: PowerSGD sends whole gradients in the first ten
PORT = 29501


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", action="append", help="of each machine's link: 100mbit; may be given again")
    parser.add_argument("--burst", type=int, default=32_768, help="bytes that a rested link passes at once")
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="that count, of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", action="append", choices=WAYS, help="beside ddp; may be given again; none: all")
    parser.add_argument("--batch-size", type=int, default=128, help="samples of a step, over all machines")
    options, overrides = parser.parse_known_args()
    print("| link | way | ms a step | its samples | ms a sample (quartiles) | samples per second, of ddp's |")
    print("|---|---|---|---|---|---|")
    try:
        for rate in options.rate or ["100mbit"]:
            bits_per_second("--rate", rate)
            with Machines(options.machines, rate, options.burst) as machines:
                measure(machines, options, overrides)
    except (NoMachines, Refusal) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def measure(machines: Machines, options: argparse.Namespace, overrides: list[str]) -> None:
    """All ways, in turns; prints a row for each."""
    steps: dict[str, list[float]] = {way: [] for way in (PLAIN, *(options.way or WAYS))}
    for _ in range(options.rounds):
        for way in steps:
            steps[way].append(median(run(machines, way, options, overrides)))
            print(f"{machines.rate} {way}: {1000 * steps[way][-1]:.0f} ms a step", file=sys.stderr)
    for way, seconds in steps.items():
        samples = batch_size(way, options)
        low, mid, high = (1000 * each / samples for each in quantiles(seconds, n=4))
        gain = median(steps[PLAIN]) / batch_size(PLAIN, options) / median(seconds) * samples
        each = f"{mid:.2f} ({low:.2f} to {high:.2f})"
        print(
            f"| {machines.rate} | `{way}` | {1000 * median(seconds):.0f} | {samples} | {each} | {gain:.2f} |",
            flush=True,
        )


def batch_size(way: str, options: argparse.Namespace) -> int:
    return int(options.batch_size) * (4 if "accumulate" in WAYS[way] else 1)


def run(machines: Machines, way: str, options: argparse.Namespace, overrides: list[str]) -> list[float]:
    """Seconds of the steps that count, on rank zero's machine."""
    warmup = WARMUP if "powersgd" in WAYS[way] else 3
    steps = warmup + options.steps
    asked = [
        *("strategy=ddp", "devices=1", f"num_nodes={options.machines}", f"rdzv_endpoint={machines.address(0)}:{PORT}"),
        *("threads=1", f"max_steps={steps}", "max_epochs=1000000", "val_every=1000000", "logger=none"),
        *("callbacks=none", "+callbacks.clock._target_=clock.Clock", f"batch_size={batch_size(way, options)}"),
        *filter(None, [WAYS[way]]),
        *overrides,
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'scripts'}"}
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for index in range(options.machines):
            command = [sys.executable, str(ROOT / "src" / "train.py"), *asked, f"outputs={folder}/{index}"]
            with Path(folder, f"{index}.log").open("w") as log:
                started.append(machines.start(index, command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        codes = [process.wait() for process in started]
        if any(codes):
            said = Path(folder, "0.log").read_text().strip().splitlines()
            raise RuntimeError(f"{way}: a run failed: {said[-1] if said else 'it said nothing'}")
        clock = next(Path(folder).rglob("clock_0.json"))  # of rank zero, wherever that is
        found: list[float] = json.loads(clock.read_text())["steps"]
        return found[warmup:]


if __name__ == "__main__":
    sys.exit(main())
