"""Under SLURM, played by two small programs: told to end, a job queues itself again, and then goes on by itself."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TINY, Program, Run, checkpoint_of, composed, free_port, summary_of, wait_for

from lockstep.config import check as config
from lockstep.errors import UserError
from lockstep.launch import environment as environment_module
from lockstep.launch import machine, slurm

JOB = (*TINY, "data.samples=256", "batch_size=8", "checkpoint_every=4", "logger=none")
LONG = (*JOB, "max_epochs=14")


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Return a folder for PATH: `squeue` tells the job's state from a file, `scontrol` writes down what it is asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "state").write_text("RUNNING\n")
    for name, line in {"squeue": f"cat {folder}/state", "scontrol": f'echo "$@" >> {folder}/asked'}.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


def environment(cluster: Path, restarts: int = 0) -> dict[str, str]:
    path = f"{cluster}:{os.environ['PATH']}"
    return {
        "PATH": path,
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "0",
        "SLURM_RESTART_COUNT": str(restarts),
    }


def terminated(program: Program, cluster: Path, *overrides: str, restarts: int = 0) -> Path:
    """Return the folder of a run that SIGTERM ended after a checkpoint."""
    began = time.time()
    process = program.start(*overrides, env=environment(cluster, restarts))

    def saved() -> list[Path]:
        return [path for path in program.outputs.rglob("last.ckpt") if path.stat().st_mtime > began]

    (checkpoint, *_) = wait_for(saved, process)
    process.send_signal(signal.SIGTERM)
    run = program.finish(process)
    assert run.returncode == 143, str(run)
    return checkpoint.parent.parent


@pytest.mark.usefixtures("engine")
def test_a_job_that_must_end_queues_itself_again_and_goes_on(run_train: Program, cluster: Path, tmp_path: Path) -> None:
    folder = terminated(run_train, cluster, *LONG)  # each time the same command, as the job script has it
    assert (cluster / "asked").read_text() == "requeue 77\n"
    (cluster / "state").write_text("COMPLETING\n")
    assert terminated(run_train, cluster, *LONG, restarts=1) == folder
    assert (cluster / "asked").read_text() == "requeue 77\n", "one that was cancelled ends"
    assert summary_of(folder)["status"] == "interrupted"
    assert folder.name.startswith("slurm_77_")
    run = run_train(*LONG, env=environment(cluster, restarts=2))
    assert run.folder == folder
    undisturbed = Program(tmp_path / "undisturbed")(*LONG)
    assert run.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]


@pytest.mark.nightly
@pytest.mark.usefixtures("engine")
def test_a_sweep_goes_on_too(run_train: Program, cluster: Path) -> None:
    sweep = (*LONG, "-m", "seed=1,1")  # the first is told to end, the second is not
    terminated(run_train, cluster, *sweep)
    run = run_train(*sweep, env=environment(cluster, restarts=1))
    first, second = (summary_of(job) for job in run.jobs)
    assert "resumes after step" in (run.jobs[0] / "train.log").read_text()
    assert first["weights_sha256"] == second["weights_sha256"]


def test_a_job_finds_the_folder_of_each_of_its_commands(tmp_path: Path, set_environment: Callable[..., None]) -> None:
    def find_folder(job: str, restarts: int, *overrides: str) -> Path | None:
        set_environment(SLURM_JOB_ID=job, SLURM_RESTART_COUNT=str(restarts))
        return slurm.folder_of_job(tmp_path, overrides)

    first, second = find_folder("77", 0, "seed=0"), find_folder("77", 0, "seed=1")
    assert first is not None
    first.mkdir()
    assert first == find_folder("77", 1, "seed=0") == find_folder("77", 2, "seed=0")
    assert len({first, second, find_folder("78", 0, "seed=0")}) == 3
    assert find_folder("77", 0, "seed=0") is None, "given twice in one life, by hand say: a run of its own"


@pytest.mark.usefixtures("processes")
def test_a_job_of_an_array_queues_itself_alone(cluster: Path, set_environment: Callable[..., None]) -> None:
    set_environment(**environment(cluster), SLURM_ARRAY_JOB_ID="77", SLURM_ARRAY_TASK_ID="3")
    assert slurm.requeue() == "SLURM job 77_3 is requeued"
    assert (cluster / "asked").read_text() == "requeue 77_3\n"


@pytest.mark.parametrize("joined", [False, True])  # whether its group has been made, so that it looks like torchrun's
def test_a_task_may_have_a_gpu_and_cores_for_itself(
    joined: bool, monkeypatch: pytest.MonkeyPatch, set_environment: Callable[..., None]
) -> None:
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    config_raw = composed("strategy=ddp", "devices=2", "precision=32-true")

    def reported_by(**variables: str) -> tuple[bool, bool]:
        set_environment(SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1", **variables)
        if joined:
            sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            set_environment(**sizes, TORCHELASTIC_RUN_ID="77", LOCKSTEP_LAUNCHER="slurm")
        return environment_module.environment().dedicated_gpu, environment_module.environment().dedicated_cores

    assert reported_by() == (False, False)
    with pytest.raises(UserError, match="devices=2: this machine has 1 GPU"):
        config.check(config_raw)
    assert reported_by(SLURM_GPUS_PER_TASK="1", SLURM_CPUS_PER_TASK="4") == (True, True)
    assert config.check(config_raw).layout.accelerator == "gpu"
    monkeypatch.delenv("LOCKSTEP_LAUNCHER", raising=False)
    set_environment(TORCHELASTIC_RUN_ID="77")  # torchrun's own workers, of a job with a task per node
    assert not environment_module.environment().dedicated_gpu


@pytest.mark.usefixtures("engine")
def test_what_a_job_was_to_resume_it_goes_on_with(run_train: Program, cluster: Path) -> None:
    """Its last checkpoint, not the older one that it was given at first."""
    folder = run_train(*JOB, "max_epochs=1").folder
    first = folder / "checkpoints" / "first.ckpt"
    first.write_bytes((folder / "checkpoints" / "last.ckpt").read_bytes())
    command = (f"resume={first}", "scheduler=constant", "max_epochs=8")
    terminated(run_train, cluster, *command)
    later = checkpoint_of(folder)["global_step"]
    assert later > checkpoint_of(folder, "first")["global_step"]
    run = run_train(*command, env=environment(cluster, restarts=1))
    assert f"resumes after step {later}\n" in run.stderr


@pytest.mark.usefixtures("engine")
def test_several_tasks_go_on_as_ranks(run_train: Program, tmp_path: Path) -> None:
    job = (*JOB, "data.samples=89", "scheduler=constant", "strategy=ddp", "devices=2")  # 71 of them trained on
    undisturbed = Program(tmp_path / "undisturbed")(*job, "max_epochs=2")
    first, _ = as_tasks(run_train, *job, "max_epochs=1")
    runs = as_tasks(run_train, f"resume={first.folder}", "max_epochs=2")
    assert [run.stderr.count("resumes after step") for run in runs] == [1, 0], "the first task speaks"
    for key in ("weights_sha256", "steps", "metrics"):
        assert runs[0].summary[key] == undisturbed.summary[key], key


def as_tasks(program: Program, *overrides: str) -> list[Run]:
    """Return a program's ends as two tasks of one job, as scripts/slurm.sh starts them."""
    job = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NUM_TASKS": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    tasks = [program.start(*overrides, env={**job, "SLURM_PROCID": i, "SLURM_LOCALID": i}) for i in "01"]
    runs = [program.finish(task) for task in tasks]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(map(str, runs))
    return runs
