"""Measure how much it saves to give two settings the same seeds:

    python scripts/lab/pairing.py experiment=mnist_fast --change lr=0.6 --change model.label_smoothing=0 --seeds 6

A run with the same seed has the same initial weights, order of samples and augmentation. If this moves the scores of
two settings alike, their difference varies less from seed to seed than the difference of two runs with other seeds.

The program trains the settings of the command line, and each change of them, with the seeds 0 to --seeds - 1. For each
change and score a Markdown table has the mean difference; the standard deviation of the difference, paired (of runs
with the same seed) and unpaired (of any two runs, from the variances of both); how many pairs show as much as 10 runs
of each without pairs, and the correlation of the two settings over the seeds with its 95% interval (Fisher's z).
Pairing saves something where the correlation is above 0.

Exit codes: 0 measured, 1 a run failed, 2 bad input.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, StatisticsError, correlation, fmean, stdev, variance
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from bench.players import program

from lockstep.programs.common.showing import markdown
from lockstep.programs.comparison.runs import find_runs

COLUMNS = ["change", "score", "seeds", "difference", "s paired", "s unpaired", "pairs for 10 runs", "correlation"]
SCORES = ("val/acc", "val/loss", "test/acc", "test/loss")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of train.py, for all runs")
    parser.add_argument("--change", action="append", required=True, help="overrides of a second setting, in quotes")
    parser.add_argument("--seeds", type=int, default=6, help="seeds of each setting, 4 at least")
    arguments = parser.parse_args()
    if arguments.seeds < 4:
        parser.error(f"--seeds {arguments.seeds}: must be 4 or more, since fewer have no correlation to speak of")
    with tempfile.TemporaryDirectory() as folder:
        try:
            sides = {
                change: train([*arguments.overrides, *change.split()], arguments.seeds, Path(folder, str(number)))
                for number, change in enumerate(["", *arguments.change])
            }
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    base = sides.pop("")
    print(markdown(COLUMNS, [row(c, s, base[s], side[s]) for c, side in sides.items() for s in SCORES if s in base]))
    return 0


def train(overrides: Sequence[str], seeds: int, folder: Path) -> dict[str, list[float]]:
    """Train a setting with each seed. Return the scores of the runs by name, in the order of the seeds.

    Raises:
        RuntimeError: a run failed.
    """
    all_seeds = f"seed={','.join(map(str, range(seeds)))}"
    try:
        program("src/train.py", "-m", *overrides, f"outputs={folder}", "logger=none", all_seeds)
    except RuntimeError as error:
        raise RuntimeError(f"{' '.join(overrides)}: {error}") from error
    runs = sorted(find_runs([folder]), key=lambda run: int(run.config["seed"]))
    names = [name for name in SCORES if all(f"metrics.{name}" in run.summary for run in runs)]
    return {name: [float(run.summary[f"metrics.{name}"]) for run in runs] for name in names}


def row(change: str, score: str, base: Sequence[float], changed: Sequence[float]) -> list[Any]:
    """Return a row of the table: what pairing saves for a change and a score."""
    measured = saving(base, changed)
    low, high = measured["correlation from"], measured["correlation to"]
    return [
        f"`{change}`",
        score,
        len(base),
        f"{measured['difference']:+.5f}",
        f"{measured['paired']:.5f}",
        f"{measured['unpaired']:.5f}",
        f"{10 * (measured['paired'] / measured['unpaired']) ** 2:.1f}" if measured["unpaired"] else "-",
        f"{measured['correlation']:+.2f} ({low:+.2f} to {high:+.2f})",
    ]


def saving(base: Sequence[float], changed: Sequence[float]) -> Mapping[str, float]:
    """Return the mean difference of two settings, its standard deviations, and the correlation over the seeds.

    Args:
        base: the scores of the first setting, by seed.
        changed: the scores of the second setting with the same seeds.
    """
    differences = [other - one for one, other in zip(base, changed, strict=True)]
    try:
        shared = correlation(base, changed)
    except StatisticsError:  # all scores of a setting are equal
        shared = 0.0
    z, half = math.atanh(max(-0.999999, min(shared, 0.999999))), NormalDist().inv_cdf(0.975) / math.sqrt(len(base) - 3)
    return {
        "difference": fmean(differences),
        "paired": stdev(differences),
        "unpaired": math.sqrt(variance(base) + variance(changed)),
        "correlation": shared,
        "correlation from": math.tanh(z - half),
        "correlation to": math.tanh(z + half),
    }


if __name__ == "__main__":
    sys.exit(main())
