"""Measure every claim about speed against the program that a user would run instead:

    python scripts/lab/benchmark.py --data-dir <folder with MNIST/>     # all, half an hour on two cores
    python scripts/lab/benchmark.py step pieces                          # some
    python scripts/lab/benchmark.py gpu                                  # left out above if there is no GPU

Both sides run on this machine in turns, one at a time. A ratio is one of medians; its spread is the quartiles over
rounds. Both sides must compute the same, or the part fails. Each process has one thread unless its description differs.
Each part writes a JSON file (--json) with machine, versions and commit.
Exit codes: 0 measured, 1 a part failed, 2 bad input.
"""

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "src"))

from bench import folders, portable, programs, steps
from bench.machine import cpu_name
from bench.players import Row
from repository import ROOT

from lockstep.config.value_checks import unknown_name_message
from lockstep.errors import UserError
from lockstep.launch.machine import available_cores, gpu_count
from lockstep.programs.common.showing import markdown
from lockstep.report.summary import git_info, versions, write_summary

PARTS: dict[str, Callable[[Path, str], list[Row]]] = {  # from a scratch folder and the folder with MNIST/
    "step": lambda folder, _: steps.step(folder),
    "overhead": lambda folder, _: steps.overhead(folder),
    "start": lambda *_: programs.start(),
    "scaling": lambda folder, _: steps.scaling(folder),
    "pieces": lambda folder, _: steps.pieces(folder),
    "survive": lambda folder, _: steps.survive(folder),
    "accuracy": lambda _, data_dir: programs.accuracy(data_dir),
    "memory": lambda *_: programs.memory(),
    "folders": lambda folder, _: folders.folders(folder),
    "portable": lambda folder, _: portable.portable(folder),
    "gpu": lambda folder, _: steps.gpu(folder),
}


def main() -> int:
    """Measure the chosen parts and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--data-dir", default="data", help="folder with MNIST/raw, unpacked")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "benchmarks", help="folder for the figures")
    options = parser.parse_args()
    try:
        for part in options.parts:
            if part not in PARTS:
                raise UserError(f"{part}: {unknown_name_message(part, PARTS)}")
        if "gpu" in options.parts and not gpu_count():
            raise UserError("gpu: this machine has no GPU that torch can use")
        chosen = options.parts or [part for part in PARTS if part != "gpu" or gpu_count()]
        if "accuracy" in chosen and not Path(options.data_dir, "MNIST", "raw", "train-images-idx3-ubyte").is_file():
            raise UserError(f"--data-dir={options.data_dir} has no MNIST/raw: train.py data=mnist downloads it")
    except UserError as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    failed = False
    for part in chosen:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows = PARTS[part](Path(folder), str(Path(options.data_dir).absolute()))
            except (RuntimeError, UserError) as error:
                print(f"error: {part}: {error}", file=sys.stderr)
                failed = True
                continue
        names = (part, "ours", "other", "ratio", "quartiles", "goal", "", "the same work")
        print(markdown(names, [row.cells() for row in rows]), flush=True)
        options.json.mkdir(parents=True, exist_ok=True)
        report = {"part": part, "rows": [asdict(row) | {"met": row.met} for row in rows]}
        report |= {"seconds": time.perf_counter() - began, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        machine = {"processor": cpu_name(), "cores": available_cores(), "system": platform.platform()}
        report |= {"machine": machine, "versions": versions(), "git": git_info()}
        write_summary(options.json / f"{part}.json", report)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
