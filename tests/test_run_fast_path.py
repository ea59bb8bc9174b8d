"""The fast path is chosen by itself, said in the start-up line, and each part of it has a key that switches it off."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import ROOT, Program

TASK = ["data=synthetic", "data.val_fraction=0", "threads=1", "callbacks=none", "logger=none"]
COUNTED = f"""
import resource, sys
sys.path.insert(0, {str(ROOT / "src")!r})
from lockstep.run import cli
from train import train
code, said = cli.run(train, "train")
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt, flush=True)
sys.exit(said or code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
def test_freed_memory_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    script = tmp_path / "counted.py"
    script.write_text(COUNTED)

    def faults(*overrides: str) -> int:
        """Pages that the kernel had to give to a run's worker."""
        run = Program(tmp_path, str(script))(
            *TASK, "data.samples=512", "batch_size=512", "max_steps=6", "max_epochs=9", *overrides
        )
        return int(run.stdout.splitlines()[-1])

    kept, given_back = faults(), faults("allocator=system")
    assert given_back - kept > 10_000, (kept, given_back)


def test_what_was_chosen_is_said_and_can_be_switched_off(run_train: Program) -> None:
    chosen = run_train(*TASK, "data.samples=100", "max_steps=1")
    assert "| 32-true | channels_last, 1 thread |" in chosen.stdout + chosen.stderr
    plain = run_train(*TASK, "data.samples=100", "max_steps=1", "memory_format=contiguous", "threads=2")
    assert "| 32-true | 2 threads |" in plain.stdout + plain.stderr
