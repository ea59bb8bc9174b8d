"""The fast path is chosen by itself, said in the start-up line, and each part of it has a key that switches it off."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest
from conftest import Program

TASK = ["data=synthetic", "data.val_fraction=0", "threads=1", "callbacks=none", "logger=none"]


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
def test_freed_memory_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    train = Program(tmp_path, fresh=True)  # a child of this process, as what is counted is of its children

    def faults(*overrides: str) -> int:
        """Pages that the kernel had to give to a run's processes."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
        train(*TASK, "data.samples=512", "batch_size=512", "max_steps=6", "max_epochs=9", *overrides)
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt - before

    kept, given_back = faults(), faults("allocator=system")
    assert given_back - kept > 10_000, (kept, given_back)


def test_what_was_chosen_is_said_and_can_be_switched_off(run_train: Program) -> None:
    chosen = run_train(*TASK, "data.samples=100", "max_steps=1")
    assert "| 32-true | channels_last, 1 thread |" in chosen.stdout + chosen.stderr
    plain = run_train(*TASK, "data.samples=100", "max_steps=1", "memory_format=contiguous", "threads=2")
    assert "| 32-true | 2 threads |" in plain.stdout + plain.stderr
