"""Under SLURM, played by two small programs: told to end, a job queues itself again, and then goes on by itself."""

from __future__ import annotations

import os
import signal
import time
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


def terminated(program: Program, cluster: Path, *overrides: str, restarts: int = 0) -> Path:
    """The folder of a run that SIGTERM ended after a checkpoint."""
    began = time.time()
    process = program.start(*overrides, env=environment(cluster, restarts))

    def saved() -> list[Path]:
        return [path for path in program.outputs.rglob("last.ckpt") if path.stat().st_mtime > began]

    (checkpoint, *_) = wait_for(saved, process)
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


def test_it_may_have_to_end_again_and_again(run_train: Program, cluster: Path) -> None:
    for restarts in range(3):
        terminated(run_train, cluster, *LONG, restarts=restarts)
    run = run_train(*LONG, env=environment(cluster, restarts=3))
    assert len(run.folders) == 1
    assert run.summary["status"] == "completed"


def test_a_sweep_goes_on_too(run_train: Program, cluster: Path, tmp_path: Path) -> None:
    sweep = (*LONG, "-m", "seed=0,1")
    for restarts in range(2):
        terminated(run_train, cluster, *sweep, restarts=restarts)
    assert (cluster / "asked").read_text() == "requeue 77\n" * 2
    run = run_train(*sweep, env=environment(cluster, restarts=2))
    undisturbed = Program(tmp_path / "undisturbed")(*sweep)
    assert len(run.jobs) == 2
    for one, other in zip(run.jobs, undisturbed.jobs, strict=True):
        assert summary_of(one)["weights_sha256"] == summary_of(other)["weights_sha256"]

    after = run_train(*JOB, "max_epochs=1", "-m", "seed=2,3", env=environment(cluster, restarts=2))
    assert len({folder.parent for folder in after.folders}) == 2, "the script's next sweep is one of its own"


def test_a_job_that_was_cancelled_ends(run_train: Program, cluster: Path) -> None:
    (cluster / "state").write_text("COMPLETING\n")
    terminated(run_train, cluster, *LONG)
    assert not (cluster / "asked").exists()


def test_another_job_starts_anew(run_train: Program, cluster: Path) -> None:
    run_train(*JOB, "max_epochs=1", env=environment(cluster))
    run = run_train(*JOB, "max_epochs=1", env=environment(cluster, restarts=1) | {"SLURM_JOB_ID": "78"})
    assert len(run.folders) == 2
