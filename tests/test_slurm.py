"""Under SLURM, played by two small programs: told to end, a job queues itself again, and then goes on by itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from conftest import Program, summary_of, wait_for

JOB = (
    "data=synthetic",
    "data.samples=256",
    "data.image_size=12",
    "data.num_classes=3",
    "batch_size=8",
    "checkpoint_every=4",
    "logger=none",
    "threads=1",
)
LONG = (*JOB, "max_epochs=15")


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder for PATH: `squeue` tells the job's state from a file, `scontrol` writes down what it is asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "state").write_text("RUNNING\n")
    for name, line in {"squeue": f"cat {folder}/state", "scontrol": f'echo "$@" >> {folder}/asked'}.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


def environment(cluster: Path, restarts: int = 0) -> dict[str, str]:
    path = f"{cluster}:{os.environ['PATH']}"
    return {"PATH": path, "SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "SLURM_RESTART_COUNT": str(restarts)}


def terminated(program: Program, cluster: Path, *overrides: str) -> Path:
    """The folder of a run that SIGTERM ended after a checkpoint."""
    process = program.start(*overrides, env=environment(cluster))
    (checkpoint, *_) = wait_for(lambda: list(program.outputs.rglob("last.ckpt")), process)
    process.send_signal(signal.SIGTERM)
    run = program.finish(process, timeout=60)
    assert run.returncode == 143, str(run)
    return checkpoint.parent.parent


def test_a_job_that_must_end_queues_itself_again_and_goes_on(run_train: Program, cluster: Path, tmp_path: Path) -> None:
    folder = terminated(run_train, cluster, *LONG)
    assert (cluster / "asked").read_text() == "requeue 77\n"
    assert summary_of(folder)["status"] == "interrupted"
    run = run_train(*LONG, env=environment(cluster, restarts=1))  # the same command, as the job script has it
    assert run.folder == folder
    undisturbed = Program(tmp_path / "undisturbed")(*LONG)
    assert run.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]

    other = run_train(*JOB, "max_epochs=1", env=environment(cluster, restarts=1))  # the script's next command
    assert len(other.folders) == 2, "a run of its own"


def test_a_job_that_was_cancelled_ends(run_train: Program, cluster: Path) -> None:
    (cluster / "state").write_text("COMPLETING\n")
    terminated(run_train, cluster, *LONG)
    assert not (cluster / "asked").exists()


def test_another_job_starts_anew(run_train: Program, cluster: Path) -> None:
    run_train(*JOB, "max_epochs=1", env=environment(cluster))
    run = run_train(*JOB, "max_epochs=1", env=environment(cluster, restarts=1) | {"SLURM_JOB_ID": "78"})
    assert len(run.folders) == 2
