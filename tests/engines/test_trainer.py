"""`lockstep.Trainer` in workers that torchrun, MPI or SLURM has started."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TIMEOUT
from engines.cluster import Cluster
from engines.sites import JOB, Site

FILE = str(ROOT / "examples" / "one_file.py")


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")


def hashes(folder: Path, *command: str) -> list[str]:
    """Run a command and return the hashes that it prints, of all ranks."""
    folder.mkdir()
    if command[: len(TORCHRUN)] == TORCHRUN:
        # it starts Python with -u, so print writes the end of a line apart, and two ranks would mix their lines
        command = (*TORCHRUN, "--log-dir=logs", "--redirects=1", *command[len(TORCHRUN) :])
    whole_lines = {**os.environ, "PYTHONUNBUFFERED": ""}
    run = subprocess.run(
        command, cwd=folder, env=whole_lines, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert run.returncode == 0, run.stderr
    output = [run.stdout, *(log.read_text() for log in sorted(folder.glob("logs/*/attempt_0/*/stdout.log")))]
    return [one for text in output for one in hashes_in(text)]


def hashes_in(output: str) -> list[str]:
    return re.findall(r"\b[0-9a-f]{64}\b|(?<=h)[0-9a-f]{64}\b", output)  # after an escape code that ends with h


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the hash of the weights on one device."""
    (one,) = hashes(tmp_path_factory.mktemp("trainer") / "one", sys.executable, FILE)
    return one


def test_one_file_prints_one_hash_under_torchrun(tmp_path: Path, one_device: str) -> None:
    assert hashes(tmp_path / "two", *TORCHRUN, FILE) == [one_device] * 2
    control = hashes(tmp_path / "control", *TORCHRUN, FILE, "--seed=1")
    assert len(control) == 2
    assert one_device not in control
    refused = subprocess.run(
        [*TORCHRUN, FILE, "--devices=3"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert "devices=3: torchrun has started 2 workers on 1 machine: give devices=2, or leave it out" in refused.stderr


TWICE = """
import lockstep

for seed in (0, 1):
    summary = lockstep.train(lockstep.compose("strategy=ddp", f"seed={{seed}}", *{job!r}))
    print(f"{{summary['folder']}} {{summary['weights_sha256']}}\\n", end="")  # at once: the other rank prints, too
"""


def test_a_worker_of_torchrun_trains_two_runs_one_after_the_other(site: Site) -> None:
    """The second was taken for a restart of the first one, which is complete."""
    script = site.home / "twice.py"
    script.write_text(TWICE.format(job=JOB))
    run = site.run("torchrun", "--nproc-per-node=2", str(script))
    assert run.returncode == 0, str(run)
    assert len(set(run.stdout.splitlines())) == 2, run.stdout
    assert len(set(hashes_in(run.stdout))) == 2, "each has its seed"


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (package openmpi-bin)")
def test_one_file_prints_one_hash_under_mpi(tmp_path: Path, one_device: str) -> None:
    mpirun = ("mpirun", "--allow-run-as-root", "-np", "2", "--oversubscribe", "--bind-to", "none", sys.executable, FILE)
    assert hashes(tmp_path / "three", *mpirun) == [one_device] * 2
    assert one_device not in hashes(tmp_path / "control", *mpirun, "--seed=1")


def test_one_file_prints_one_hash_on_two_nodes_of_slurm(cluster: Cluster, site: Site, one_device: str) -> None:
    script = site.home / "one_file.sh"
    script.write_text(f'#!/bin/bash\nsrun python {FILE} "$@"\n')
    job = cluster.submit(site, "--nodes=2", "--cpus-per-task=1", str(script))
    control = cluster.submit(site, "--nodes=2", "--cpus-per-task=1", str(script), "--seed=1", output="control")
    assert cluster.wait(job)["JobState"] == cluster.wait(control)["JobState"] == "COMPLETED", cluster.output(job)
    assert hashes_in(cluster.output(job)) == [one_device] * 2
    assert one_device not in hashes_in(cluster.output(control))
