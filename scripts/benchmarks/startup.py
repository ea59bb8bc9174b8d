"""From the command to the first optimizer step, against the bare imports.

Each round runs, one after the other: the bare imports; a run on one device; one on two ddp workers; a sweep of three
jobs. A run's seconds are those of its summary.json, from the first line of train.py to the end of the first step, plus
what the interpreter takes to get there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.run.checks import ROOT

BARE = "import torch, torchvision, lightning"
RATIO, SECONDS = 1.15, 1.5  # goals: of the bare imports; of ddp over one device, and of a sweep's further job
RUN = [sys.executable, "src/train.py", "max_steps=2"]

Figures = dict[str, dict[str, Any]]


def measure(rounds: int) -> Figures:
    """Seconds, and the ratio of medians: `start` (a run's first step against the bare imports), `ddp` (on two workers
    against one device), `job` (from the end of a sweep's job to the end of the next one, which takes two steps and is
    tested, against a run by itself), `command` (two steps and a test, from start to exit, against the bare imports).

    Raises:
        subprocess.CalledProcessError: a program failed.
    """
    pairs: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ("start", "ddp", "job", "command")}
    for _ in range(rounds):
        interpreter = seconds([sys.executable, "-c", "pass"])
        bare = seconds([sys.executable, "-c", BARE])
        (one,), _, command = run([])
        (two,), *_ = run(["strategy=ddp", "devices=2"])
        _, ends, _ = run(["-m", "seed=0,1,2"])
        one, two = one + interpreter, two + interpreter
        further = [end - before for before, end in pairwise(ends)]
        row = {"start": (one, bare), "ddp": (two, one), "job": (median(further), command), "command": (command, bare)}
        for name, (ours, other) in row.items():
            pairs[name][0].append(ours)
            pairs[name][1].append(other)
    return {
        name: {"ours": ours, "other": other, "ratio": median(ours) / median(other)}
        for name, (ours, other) in pairs.items()
    }


def run(overrides: Sequence[str]) -> tuple[list[float], list[float], float]:
    """Of each job: seconds to its first step, and when it ended; seconds of the whole command."""
    with tempfile.TemporaryDirectory() as outputs:
        whole = seconds([*RUN, *overrides, f"outputs={outputs}"])
        files = sorted(Path(outputs).rglob("summary.json"), key=lambda file: file.stat().st_mtime)
        firsts = [json.loads(file.read_text())["throughput"]["seconds_to_first_step"] for file in files]
        return firsts, [file.stat().st_mtime for file in files], whole


def seconds(command: list[str]) -> float:
    """How long a program runs."""
    began = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - began
