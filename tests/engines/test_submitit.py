"""Sweeps on submitit: jobs of a real SLURM cluster of two nodes, which are preempted and queued again."""

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import Run, summary_of, wait_for
from engines.cluster import Cluster
from engines.sites import JOB, SECONDS, SLOW, Site, everything

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="hydra-submitit-launcher is not installed")


def restarted(cluster: Cluster, job: str) -> bool:
    return cluster.state(job).get("Restarts") == "1"


def start_sweep(
    cluster: Cluster, site: Site, *options: str, count: int
) -> tuple["subprocess.Popen[str]", list[Path], list[Path]]:
    """Start a sweep of slow jobs; wait until each has saved. Returns the command, the jobs' folders and logs."""
    site.placed = lambda command: cluster.command(*command)
    command = ["python", "src/train.py", "-m", *JOB, SLOW, "hydra/launcher=submitit_slurm", *options, "name=sweep"]
    sweep = site.start(*command, env=cluster.variables)
    wait_for(lambda: len(list(site.outputs.rglob("last.ckpt"))) == count, sweep, SECONDS)
    folders = sorted(file.parents[1] for file in site.outputs.rglob("last.ckpt"))
    logs = sorted(folders[0].parent.glob(".submitit/*/*_0_log.err"))
    cluster.jobs.update((log.parent.name, log) for log in logs)
    return sweep, folders, logs


@pytest.mark.parametrize(("tasks", "seeds"), [(1, "0,0"), (2, "0")])
def test_jobs_are_preempted_and_continue(cluster: Cluster, site: Site, one_device: Run, tasks: int, seeds: str) -> None:
    """Two jobs, which are the same, on a node each, and one job of two tasks. The first gets SIGUSR2, as submitit has
    SLURM send it before the job's time is up; the second makes room for a job of a higher partition, which is SIGCONT,
    SIGTERM and a while later SIGKILL. One task starts two workers; two tasks are two workers."""
    layout = ["strategy=ddp", *(["devices=2"] if tasks == 1 else [])]
    options = [*layout, f"hydra.launcher.cpus_per_task={2 // tasks}", f"hydra.launcher.tasks_per_node={tasks}"]
    sweep, folders, logs = start_sweep(cluster, site, *options, f"seed={seeds}", count=len(seeds.split(",")))
    jobs = [log.parent.name for log in logs]

    cluster.ask("scancel", "--signal=USR2", jobs[0])
    for job in jobs[1:]:
        node = f"--nodelist={cluster.state(job)['NodeList']}"
        cluster.submit(site, "--partition=high", node, "--exclusive", "--wrap=true", output="high")
    for job in jobs:
        cluster.wait_until(job, partial(restarted, cluster, job))
    requeued = time.time()
    site.hurry()
    run = site.finish(sweep)

    assert run.returncode == 0, everything(run) + "".join(map(cluster.output, jobs))
    for folder, log in zip(folders, logs, strict=True):
        output, summary = log.read_text(), summary_of(folder)
        assert output.count("asked to end: saved last.ckpt after step") == 1, output
        assert output.count("resumes after step") == 1, output
        assert "Traceback" not in output, output
        assert summary["weights_sha256"] == one_device.summary["weights_sha256"], summary
        assert summary["layout"]["devices"] == 2
        since = (folder / "summary.json").stat().st_mtime - requeued
        assert summary["throughput"]["seconds_to_first_step"] < since, "the time in the queue counts"


def test_a_sweep_that_lost_a_job_is_resumed(cluster: Cluster, site: Site, one_device: Run) -> None:
    """One of two jobs is cancelled, and the command is interrupted. The other job goes on without the command, and
    `sweep.resume=` queues what is missing: the cancelled job continues, the completed one is not run again."""
    options = ["strategy=ddp", "devices=2", "hydra.launcher.cpus_per_task=2", "seed=0,0"]
    sweep, folders, logs = start_sweep(cluster, site, *options, count=2)
    jobs = [log.parent.name for log in logs]

    cluster.ask("scancel", jobs[1])
    cluster.wait(jobs[1], "CANCELLED")
    os.killpg(sweep.pid, signal.SIGINT)
    cut = site.finish(sweep)
    assert cut.returncode == 130, everything(cut)
    site.hurry()
    cluster.wait(jobs[0])
    completed = [summary_of(folder) for folder in folders if summary_of(folder).get("status") == "completed"]
    assert len(completed) == 1, [summary_of(folder) for folder in folders]

    resumed = site.run("python", "src/train.py", f"sweep.resume={folders[0].parent}", env=cluster.variables)
    assert resumed.returncode == 0, everything(cut, resumed)
    assert len(list(folders[0].parent.glob(".submitit/*/*_0_log.err"))) > 2, "the rest was not queued in SLURM"
    summaries = [summary_of(folder) for folder in folders]
    assert completed[0] in summaries, "a completed job was run again"
    for folder, summary in zip(folders, summaries, strict=True):
        assert summary["weights_sha256"] == one_device.summary["weights_sha256"], summary
        assert (folder / "train.log").read_text().count("resumes after step") == (summary not in completed)
