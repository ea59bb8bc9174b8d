"""Promise 6: struck at random, a run goes on. scripts/chaos.py with a short seed; docs/daily.md quotes a long one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, wait_for
from machines import Machines, NoMachines

pytestmark = pytest.mark.slow


def chaos(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "chaos.py"), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "chaos.py"), "max_epochs=100000"]
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: [*tmp_path.rglob("last.ckpt")], process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "interrupted: nothing is concluded\n")
    assert not list(tmp_path.iterdir())


def test_one_layout_survives_faults() -> None:
    done = chaos("--faults=8", "--layouts=ddp_accumulate")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 faults" in done.stdout


def test_exact_survives_faults_on_changing_layouts() -> None:
    done = chaos("--exact", "--faults=5", "--seed=1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_that_goes_on_otherwise_is_told_apart() -> None:
    """The control: another seed after each fault, of which all four end a life; one may strike when nothing is left
    to do."""
    done = chaos("--faults=4", "--layouts=single", "--control", "--seed=31", "max_epochs=6")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "PROBLEM weights_sha256" in done.stdout


@pytest.fixture
def machines() -> None:
    try:
        with Machines(2):
            pass
    except NoMachines as reason:
        pytest.skip(str(reason))


@pytest.mark.usefixtures("machines")
def test_a_run_over_machines_survives_faults() -> None:
    """The machine that keeps the run is killed and comes back; then a worker is killed."""
    done = chaos("--machines=2", "--faults=2", "--seed=6", "max_epochs=4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 x keeper killed, 1 x worker killed" in done.stdout


@pytest.mark.usefixtures("machines")
def test_a_run_over_machines_that_goes_on_otherwise_is_told_apart() -> None:
    """The control: all machines are killed, and go on with another seed."""
    done = chaos("--machines=2", "--faults=1", "--control", "max_epochs=2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "PROBLEM weights_sha256" in done.stdout
    assert "exit code" not in done.stdout
