"""Find the smallest `accumulate_grad_batches` with which a run fits the memory:

    lockstep fit-memory model=resnet18 data=cifar10 batch_size=1024 strategy=ddp devices=2

The arguments are the run's overrides. For each number of micro-batches a new process runs `src/train.py` for two
optimizer steps, one batch of validation and one of the test, in a temporary folder. The program prints the value to
use. If two does not divide batch_size, the next number is the one that the run's own message proposes. If not even
single samples fit on several devices, it tries the layout that the message proposes, with a part of the weights on each
device, and prints this setting too: `strategy=fsdp`, then `strategy.reshard=true`.
Exit codes: 0 found, 1 not even single samples fit; if `src/train.py` fails for another reason, its exit code.
"""

import re
import subprocess
import sys
import tempfile
from typing import Any

from lockstep import exit_on_signal
from lockstep.launch.programs import started
from lockstep.project import project

SHORT = ("max_steps=2", "++debug.trainer.limit_val_batches=1", "++debug.trainer.limit_test_batches=1")
LACKING = re.compile(r"out of memory|MemoryError|can't allocate memory|bad_alloc", re.IGNORECASE)
NEXT = re.compile(r"\(accumulate_grad_batches=(\d+)\) takes less")
OTHER = re.compile(r", or (strategy\S*)=(\S+)$")


def attempt(overrides: list[str], micro_batches: int) -> tuple[int, str]:
    """Train for two steps with `micro_batches` micro-batches. Return the exit code and what was written to stderr."""
    with tempfile.TemporaryDirectory(prefix="fit_memory_") as folder:
        settings = (f"accumulate_grad_batches={micro_batches}", f"outputs={folder}", *SHORT)
        streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        with started(project(), [*overrides, *settings], **streams) as process:
            _, errors = process.communicate()
            return process.returncode, errors


def main(overrides: list[str]) -> int:
    """Try 1, 2, 4, ... micro-batches. Return the exit code."""
    if not overrides or {"-h", "--help"} & set(overrides):
        print(__doc__)
        return 0
    exit_on_signal.restore()
    micro_batches = 1
    layout: dict[str, str] = {}  # the value of each key that the run's messages have proposed
    while True:
        changed = [f"{key}={value}" for key, value in layout.items()]
        unchanged = [each for each in overrides if each.partition("=")[0] not in layout]
        code, errors = attempt([*unchanged, *changed], micro_batches)
        if code == 0:
            print(*changed, f"accumulate_grad_batches={micro_batches}")
            return 0
        if not LACKING.search(errors):
            sys.stderr.write(errors)
            return code
        reason = next(line for line in errors.splitlines() if LACKING.search(line))
        print(*changed, f"accumulate_grad_batches={micro_batches} does not fit: {reason}", file=sys.stderr)
        if other := OTHER.search(reason):
            micro_batches = 1
            layout[other[1]] = other[2]
            continue
        if "can't be cut finer" in reason or "pieces do not change it" in reason:
            return 1
        finer = NEXT.search(errors)
        micro_batches = int(finer[1]) if finer else 2 * micro_batches
