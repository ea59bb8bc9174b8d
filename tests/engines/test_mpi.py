"""MPI: mpirun starts the workers. Open MPI, and what MPICH and Intel MPI call the same things."""

import os
import shutil
import signal

import pytest
from conftest import Run
from engines.sites import BAD, JOB, SLOW, Site, ended_well, everything, refused_once

pytestmark = [
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (package openmpi-bin)"),
]
# Seconds that it waits before SIGTERM, and again before SIGKILL; its own default is one second.
PATIENT = ("--mca", "odls_base_sigkill_timeout", "5")


def mpirun(count: int) -> tuple[str, ...]:
    return ("mpirun", "-np", str(count), "--oversubscribe", "--bind-to", "none", *PATIENT, "python", "src/train.py")


def test_three_ranks_and_bad_input(site: Site, one_device: Run) -> None:
    run = site.run(*mpirun(3), "strategy=ddp", *JOB, "name=three")
    assert run.returncode == 0, str(run)
    summary = ended_well("three", [site], one_device, everything(run))
    assert (summary["layout"]["devices"], summary["layout"]["num_nodes"]) == (3, 1), "as mpirun has started them"

    refused = site.run(*mpirun(2), "strategy=ddp", *JOB, BAD, "name=refused")
    assert refused.returncode == 2, str(refused)
    assert refused_once(everything(refused)), str(refused)
    assert not list(site.outputs.glob("refused/*"))
    differs = site.run(*mpirun(2), "strategy=ddp", "devices=3", *JOB, "name=refused")
    assert (differs.returncode, everything(differs).count("error: devices=3")) == (2, 1), str(differs)


def test_sigterm_saves_and_the_same_command_goes_on(site: Site, one_device: Run) -> None:
    process = site.start(*mpirun(2), "strategy=ddp", *JOB, SLOW, "name=stopped")
    folder = site.wait_for_checkpoint("stopped", process)
    os.kill(process.pid, signal.SIGTERM)
    assert site.finish(process).returncode != 0
    site.hurry()
    assert "asked to end: saved last.ckpt" in (folder / "train.log").read_text()
    run = site.run(*mpirun(2), f"resume={folder}")
    assert run.returncode == 0, str(run)
    ended_well("stopped", [site], one_device, everything(run))


def test_ranks_by_the_variables_of_mpich_and_intel_mpi(site: Site, one_device: Run) -> None:
    """Played: both set these. There is no address of rank zero among them: on one machine it is this one."""
    processes = []
    for rank in "01":
        variables = {"PMI_RANK": rank, "PMI_SIZE": "2", "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": "2"}
        processes.append(site.start("python", "src/train.py", "strategy=ddp", *JOB, "name=pmi", env=variables))
    runs = [site.finish(process) for process in processes]
    assert [run.returncode for run in runs] == [0, 0], everything(*runs)
    ended_well("pmi", [site], one_device, everything(*runs))
