"""Under SLURM, played by two small programs: told to end, a job queues itself again, and then goes on by itself."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Program, Run, free_port, summary_of, wait_for
from omegaconf import OmegaConf

from lockstep.run import resume

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
LONG = (*JOB, "max_epochs=30")


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
    run = program.finish(process)
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


def test_several_tasks_go_on_as_ranks(run_train: Program, tmp_path: Path) -> None:
    job = (*JOB, "data.samples=89", "scheduler=constant", "strategy=ddp", "devices=2")  # 71 of them trained on
    undisturbed = Program(tmp_path / "undisturbed")(*job, "max_epochs=2")
    first, _ = as_tasks(run_train, *job, "max_epochs=1")
    runs = as_tasks(run_train, f"resume={first.folder}", "max_epochs=2")
    assert [run.stderr.count("resumes after step") for run in runs] == [1, 0], "the first task speaks"
    for key in ("weights_sha256", "steps", "metrics"):
        assert runs[0].summary[key] == undisturbed.summary[key], key


@pytest.mark.parametrize("flags", [["--config-dir", "{}"], ["--config-dir={}"]])
def test_what_was_composed_from_a_folder_of_ones_own_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    flags = [flag.format(tmp_path) for flag in flags]
    task = ["experiment=best", f"outputs={tmp_path}"]
    for file, content in {
        "experiment/best.yaml": "# @package _global_\nname: best\n",
        "best/1/checkpoints/last.ckpt": "",
        "best/1/provenance.json": '{"slurm_job": "77"}',
        "best/1/.hydra/overrides.yaml": OmegaConf.to_yaml(task),
        "best/sweeps/2/0/provenance.json": '{"slurm_job": "77"}',
        "best/sweeps/2/multirun.yaml": OmegaConf.to_yaml({"hydra": {"overrides": {"task": [*task, "seed=0,1"]}}}),
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert f"hydra.run.dir='{tmp_path / 'best' / '1'}'" in resume.overrides([*flags, *task], "train")
    sweep = resume.overrides(["-m", *flags, *task, "seed=0,1"], "train")
    assert sweep == [f"sweep.resume={tmp_path / 'best' / 'sweeps' / '2'}", "-m", *flags]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "environment", ["SLURM_JOB_ID SLURM_NTASKS=2 SLURM_PROCID=", "TORCHELASTIC_RUN_ID WORLD_SIZE=2 RANK="]
)
def test_the_first_worker_records_what_a_run_goes_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str, rank: int
) -> None:
    for variable in f"{environment}{rank}".split():
        monkeypatch.setenv(*variable.partition("=")[::2])
    given = SimpleNamespace(overrides=SimpleNamespace(task=["max_epochs=2"]))
    monkeypatch.setattr(resume, "HydraConfig", SimpleNamespace(get=lambda: given))
    with resume.recorded(OmegaConf.create({"max_epochs": 2}), tmp_path, ()):
        assert len(list(tmp_path.glob(".hydra/*.yaml"))) == (2 if rank == 0 else 0)


def as_tasks(program: Program, *overrides: str) -> list[Run]:
    """A program's ends as two tasks of one job, as scripts/slurm.sh starts them."""
    job = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    tasks = [program.start(*overrides, env={**job, "SLURM_PROCID": i, "SLURM_LOCALID": i}) for i in "01"]
    runs = [program.finish(task) for task in tasks]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(map(str, runs))
    return runs
