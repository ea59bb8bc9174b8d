"""Every claim about speed, measured: ours against what one would run instead.

    python scripts/bench/benchmark.py --data-dir <folder with MNIST/>     # all, half an hour on two cores
    python scripts/bench/benchmark.py step pieces                          # some
    python scripts/bench/benchmark.py gpu                                  # left out above where there is no GPU

Both sides run on this machine, interleaved, one at a time; a ratio is that of medians, its spread the quartiles over
rounds. Before a ratio counts, both sides must have computed the same. One thread a process unless said otherwise. Each
part writes a JSON file (--json) with machine, versions and commit.
Exit codes: 0 measured, 1 a part failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1]))

from common.machine import cpu_name
from common.showing import wide_console
from parts import programs, steps
from parts.folders import folders
from parts.gpu import gpu
from parts.players import Row
from rich import box
from rich.table import Table

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.machine import cores, gpu_count
from lockstep.run.checks import ROOT, unknown
from lockstep.run.summary import git_info, versions, write_summary

PARTS: dict[str, Callable[[Path, str], list[Row]]] = {  # of a folder to work in, and the folder with MNIST/
    "step": lambda folder, _: steps.step(folder),
    "start": lambda *_: programs.start(),
    "scaling": lambda folder, _: steps.scaling(folder),
    "pieces": lambda folder, _: steps.pieces(folder),
    "accuracy": lambda _, data_dir: programs.accuracy(data_dir),
    "memory": lambda *_: programs.memory(),
    "folders": lambda folder, _: folders(folder),
    "busy": lambda *_: programs.busy(),
    "gpu": lambda folder, _: gpu(folder),
}


def main() -> int:
    """Measures the parts asked for, prints a table each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; none: all")
    parser.add_argument("--data-dir", default="data", help="holds MNIST/raw, unpacked")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "benchmarks", help="folder for the figures")
    options = parser.parse_args()
    try:
        for part in options.parts:
            if part not in PARTS:
                raise Refusal(f"{part}: {unknown(part, PARTS)}")
        if "gpu" in options.parts and not gpu_count():
            raise Refusal("gpu: this machine has no GPU that torch can use")
        chosen = options.parts or [part for part in PARTS if part != "gpu" or gpu_count()]
        raw = Path(options.data_dir, "MNIST", "raw")
        if "accuracy" in chosen and not (raw / "train-images-idx3-ubyte").is_file():
            raise Refusal(f"--data-dir={options.data_dir}: no MNIST/raw in it; train.py data=mnist downloads it")
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    console = wide_console(150)
    failed = False
    for part in chosen:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows = PARTS[part](Path(folder), str(Path(options.data_dir).absolute()))
            except (RuntimeError, Refusal) as error:
                print(f"error: {part}: {error}", file=sys.stderr)
                failed = True
                continue
        seconds = time.perf_counter() - began
        console.print(table(part, rows, seconds))
        options.json.mkdir(parents=True, exist_ok=True)
        found = {"part": part, "rows": [asdict(line) | {"met": line.met} for line in rows]}
        write_summary(options.json / f"{part}.json", found | {"seconds": seconds} | here())
    return int(failed)


def here() -> dict[str, Any]:
    """Where and when: what figures are worth nothing without."""
    machine = {"processor": cpu_name(), "cores": cores(), "system": platform.platform()}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"machine": machine, "date": date, "versions": versions(), "git": git_info()}


def table(part: str, rows: list[Row], seconds: float) -> Table:
    """A line for each comparison."""
    shown = Table("what", "ours", "other", "ratio", "quartiles", "goal", "", box=box.SIMPLE_HEAD)
    for line in rows:
        goal = "" if line.goal is None else f"{'>=' if line.at_least else '<='} {line.goal:g}"
        verdict = {None: "", True: "met", False: "NOT MET"}[line.met]
        sides = [f"{side:.4g} {line.unit}".strip() for side in (line.ours, line.other)]
        quartiles = "" if line.spread is None else f"{line.spread[0]:.3f} .. {line.spread[1]:.3f}"
        shown.add_row(line.what, *sides, f"{line.ratio:.3f}", quartiles, goal, verdict)
        if line.check:
            shown.add_row(f"[dim]  {line.check}[/dim]")
    shown.title, shown.title_justify = f"{part} ({seconds:.0f} s)", "left"
    return shown


if __name__ == "__main__":
    sys.exit(main())
