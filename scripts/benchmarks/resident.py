"""What a worker keeps in memory, against a bare loop that does the same.

Both train on images of 28 x 28 in memory, in turn, and ours validates and tests besides; the peak resident memory is
the kernel's own (VmHWM). Beside it stands the proportional memory of all processes of a run (PSS), in which shared
pages count once. Linux only.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.players import ROOT

GOAL = 1.1  # a worker's peak over the bare loop's, at most
MIB = 1024  # KiB, in which the kernel counts
CASES = {"mnist_cnn": (64, 200, 60_000), "resnet18": (32, 6, 6_000)}  # batch size, steps, images

Figures = dict[str, dict[str, Any]]


def measure(rounds: int) -> Figures:
    """Peak resident MiB of one worker (`ours`) and of the bare loop (`other`), and the ratio of their medians; with two
    workers the larger of both. `ours_total` and `other_total` are PSS of all processes.

    Raises:
        subprocess.CalledProcessError: a program failed.
    """
    found: Figures = {}
    for _ in range(rounds):
        for model, (batch_size, steps, samples) in CASES.items():
            bare = [sys.executable, "scripts/opponents/bare_memory.py", model, *map(str, (batch_size, steps, samples))]
            other, other_total = watch(bare, workers=False)
            for devices in (1, 2):
                with tempfile.TemporaryDirectory() as outputs:
                    run = [
                        sys.executable,
                        "src/train.py",
                        f"model={model}",
                        "data=synthetic",
                        f"data.samples={samples}",
                    ]
                    run += [f"batch_size={batch_size * devices}", f"max_steps={steps}", f"outputs={outputs}"]
                    run += [] if devices == 1 else ["strategy=ddp", f"devices={devices}"]
                    ours, ours_total = watch(run, workers=True)
                case = found.setdefault(
                    model if devices == 1 else f"{model}, ddp 2",
                    {"ours": [], "other": [], "ours_total": [], "other_total": []},
                )
                for name, value in zip(case, (ours, other, ours_total, other_total), strict=False):
                    case[name].append(value)
    for case in found.values():
        case["ratio"] = median(case["ours"]) / median(case["other"])
    return found


def watch(command: list[str], workers: bool) -> tuple[float, float]:
    """Runs a program to its end; MiB at the peak of its largest worker (or of itself), and PSS of all its processes."""
    peak, total = 0.0, 0.0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while process.poll() is None:
            with suppress(OSError):  # one that ends meanwhile
                listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                measured = listed if workers else [str(process.pid)]
                peak = max([peak, *(kept(pid, "status", "VmHWM") for pid in measured)])
                total = max(total, sum(kept(pid, "smaps_rollup", "Pss") for pid in {*listed, str(process.pid)}))
            time.sleep(0.02)
        said = process.stderr.read() if process.stderr else None
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=said)
    return peak, total


def kept(pid: str, file: str, name: str) -> float:
    """A line of a file in /proc that counts in KiB, in MiB; 0 for a process that has just ended."""
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next((int(line.split()[1]) / MIB for line in lines if line.startswith(f"{name}:")), 0.0)
