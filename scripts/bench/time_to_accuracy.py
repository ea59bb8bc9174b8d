"""Seconds from a command to its test accuracy on MNIST: our recipes against the program of pytorch/examples.

    python scripts/bench/time_to_accuracy.py --data-dir <folder with MNIST/>

Runs `experiment=mnist_fast` and `experiment=mnist_best` for every seed, and in their midst, once,
opponents/examples_mnist.py until it has 99.0%: real commands, one at a time, with all cores. Seconds are those until
the test result stands in summary.json or on the opponent's console. The opponent takes a few minutes on two cores.
Exit codes: 0 measured, 1 a command failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1]))

from rich import box
from rich.table import Table
from showing import wide_console

from lockstep.arithmetic.layout import Refusal
from lockstep.run.checks import ROOT
from lockstep.run.summary import summary_of

RECIPES = {"mnist_fast": 0.99, "mnist_best": 0.995}  # and the test accuracy that each is for
OPPONENT, OPPONENT_TARGET = "pytorch/examples", 0.99
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class CommandFailed(Exception):
    """A command that was measured ended with another exit code than 0."""


@dataclass
class Racer:
    """One recipe's runs. Lists have an entry for each seed.

    Attributes:
        target: test accuracy that it is for.
        accuracy: on the 10,000 test images.
        seconds: from the command to the test result.
    """

    target: float
    accuracy: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def times_as_fast(self, opponent: Racer) -> float:
        return mean(opponent.seconds) / mean(self.seconds)


def measure(data_dir: str, seeds: Sequence[int] = range(5), overrides: Sequence[str] = ()) -> dict[str, Racer]:
    """Runs everything; the opponent comes last.

    Args:
        data_dir: holds MNIST/raw, unpacked.
        seeds: of our recipes' runs.
        overrides: for our runs, Hydra's.

    Raises:
        Refusal: the data is not there.
        CommandFailed: naming the command, and what it said.
    """
    home = Path(data_dir).absolute()
    if missing := [name for name in FILES if not (home / "MNIST" / "raw" / name).is_file()]:
        where = home / "MNIST" / "raw"
        raise Refusal(
            f"no {missing[0]} in {where}: python src/train.py data=mnist data_dir=... downloads and unpacks it"
        )
    racers = {name: Racer(target) for name, target in (*RECIPES.items(), (OPPONENT, OPPONENT_TARGET))}
    order = [(name, seed) for seed in seeds for name in RECIPES]
    order.insert(len(order) // 2, (OPPONENT, 0))
    for name, seed in order:
        accuracy, seconds = _opponent(home) if name == OPPONENT else _recipe(name, seed, home, overrides)
        racers[name].accuracy.append(accuracy)
        racers[name].seconds.append(seconds)
    return racers


def _recipe(name: str, seed: int, data_dir: Path, overrides: Sequence[str]) -> tuple[float, float]:
    """Test accuracy of one run of ours, and seconds to it."""
    with tempfile.TemporaryDirectory() as outputs:
        own = [f"experiment={name}", f"seed={seed}", f"data_dir={data_dir}", f"outputs={outputs}", "name=run"]
        began = time.time()
        _command("src/train.py", *own, *overrides)
        (folder,) = Path(outputs, "run").iterdir()
        ended = (folder / "summary.json").stat().st_mtime
        return float(summary_of(folder)["metrics"]["test/acc"]), ended - began


def _opponent(data_dir: Path) -> tuple[float, float]:
    """The same of the opponent; its own clock starts with its first line."""
    program = "scripts/bench/opponents/examples_mnist.py"
    said = _command(program, f"--data-dir={data_dir}", f"--target={OPPONENT_TARGET}")
    accuracy, seconds = re.findall(r"test/acc ([\d.]+)  ([\d.]+) s", said)[-1]
    return float(accuracy), float(seconds)


def _command(program: str, *arguments: str) -> str:
    """What it printed."""
    done = subprocess.run([sys.executable, program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing said"]
        raise CommandFailed(f"{program} {arguments[0]}: exit code {done.returncode}: {said[-1]}")
    return done.stdout


def table(racers: dict[str, Racer]) -> Table:
    """A row for each recipe."""
    names = ("recipe", "target", "test accuracy of each seed", "mean", "s to it", "times as fast")
    shown = Table(*names, box=box.SIMPLE_HEAD)
    for name, racer in racers.items():
        each = ", ".join(f"{accuracy:.2%}" for accuracy in racer.accuracy)
        times = f"{mean(racer.seconds):.1f}", f"{racer.times_as_fast(racers[OPPONENT]):.1f}"
        shown.add_row(name, f"{racer.target:.1%}", each, f"{mean(racer.accuracy):.2%}", *times)
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="folder that holds MNIST/raw")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each recipe (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", help="for our runs, e.g. threads=1")
    options = parser.parse_args()
    try:
        if options.seeds < 1:
            raise Refusal(f"--seeds={options.seeds}: at least 1")
        racers = measure(options.data_dir, range(options.seeds), options.overrides)
    except (Refusal, CommandFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refusal) else 1
    wide_console(120, highlight=False).print(table(racers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
