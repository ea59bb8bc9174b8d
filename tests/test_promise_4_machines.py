"""Several machines, each a network namespace with a link, name and folders of its own, take the step of one device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Program, summary_of
from machines import Machines, NoMachines

TASK = ("max_epochs=1", "exact=true", "pieces=2", "threads=1")


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    try:
        with Machines(2) as made:
            yield made
    except NoMachines as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
def test_two_machines_make_the_bits_of_one_device(machines: Machines, run_train: Program, tmp_path: Path) -> None:
    met = f"rdzv_endpoint={machines.address(0)}:29500"
    options = (*TASK, "strategy=ddp", "devices=1", "num_nodes=2", met)
    processes = []
    for index, name in enumerate(machines.names):
        command = [sys.executable, str(ROOT / "src" / "train.py"), *options, f"outputs={tmp_path / name}"]
        processes.append(machines.start(index, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    said = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    (summary,) = [path.parent for name in machines.names for path in (tmp_path / name).rglob("summary.json")]
    one = run_train(*TASK).summary["weights_sha256"]
    assert summary_of(summary)["weights_sha256"] == one
    assert run_train(*TASK, "seed=1", "name=other").summary["weights_sha256"] != one  # the control
