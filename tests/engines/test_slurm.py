"""SLURM: scripts/slurm.sh on a real cluster of two nodes, and what queues a job again."""

import signal

import pytest
from conftest import Run
from engines.cluster import Cluster
from engines.sites import BAD, JOB, SLOW, Site, ended_well, refused_once

TWO_NODES = ("--nodes=2", "--cpus-per-task=1", "scripts/slurm.sh")
TWO_TASKS = ("--ntasks-per-node=2", "--cpus-per-task=1", "scripts/slurm.sh")


def wait_for_checkpoint(cluster: Cluster, site: Site, name: str, job: str) -> None:
    """Wait until a job has saved once more."""
    before = site.saved(name)
    cluster.wait_until(job, lambda: site.saved(name) > before)


def wait_for_requeue(cluster: Cluster, site: Site, job: str) -> None:
    """Wait until a job is queued again, and let it run fast from then on."""
    cluster.wait_until(job, lambda: cluster.state(job).get("Restarts") == "1")
    site.hurry()


def test_one_task_and_bad_input(cluster: Cluster, site: Site, one_device: Run) -> None:
    job = cluster.submit(site, "scripts/slurm.sh", *JOB, "name=one_task")
    refused = cluster.submit(site, *TWO_NODES, *JOB, BAD, "name=refused", output="refused")
    assert cluster.wait(job)["JobState"] == "COMPLETED", cluster.output(job)
    ended_well("one_task", [site], one_device, cluster.output(job))
    assert cluster.wait(refused)["ExitCode"] == "2:0"
    assert refused_once(cluster.output(refused)), cluster.output(refused)
    assert not list(site.outputs.glob("refused/*"))


@pytest.mark.parametrize("stopped", ["signal", "requeue"])
def test_two_nodes_are_queued_again_and_go_on(cluster: Cluster, site: Site, one_device: Run, stopped: str) -> None:
    """By SIGTERM, as SLURM sends it some time before a job's end, and by `scontrol requeue`."""
    job = cluster.submit(site, *TWO_NODES, *JOB, SLOW, f"name={stopped}")
    wait_for_checkpoint(cluster, site, stopped, job)
    if stopped == "signal":
        cluster.ask("scancel", "--signal=TERM", job)
    else:
        cluster.ask("scontrol", "requeue", job)
    wait_for_requeue(cluster, site, job)
    known = cluster.wait(job)
    assert (known["JobState"], known["Restarts"]) == ("COMPLETED", "1"), cluster.output(job)
    output = cluster.output(job)
    assert output.count("resumes after step") == 1, output
    summary = ended_well(stopped, [site], one_device, output)
    assert (summary["layout"]["devices"], summary["layout"]["num_nodes"]) == (1, 2)


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_the_signals_of_lightning_and_submitit_save_and_requeue(
    cluster: Cluster, site: Site, one_device: Run, signum: signal.Signals
) -> None:
    """To two tasks of one node, as `#SBATCH --signal=USR1@120` sends it."""
    job = cluster.submit(site, *TWO_TASKS, *JOB, SLOW, "name=usr")
    wait_for_checkpoint(cluster, site, "usr", job)
    cluster.ask("scancel", f"--signal={signum.name.removeprefix('SIG')}", job)
    wait_for_requeue(cluster, site, job)
    known = cluster.wait(job)
    assert (known["JobState"], known["Restarts"]) == ("COMPLETED", "1"), cluster.output(job)
    assert "saved last.ckpt after step" in cluster.output(job)
    ended_well("usr", [site], one_device, cluster.output(job))


def test_a_node_dies(cluster: Cluster, site: Site, one_device: Run) -> None:
    """SLURM misses it after SlurmdTimeout, queues the job again, and starts it when two nodes are there."""
    job = cluster.submit(site, *TWO_NODES, *JOB, SLOW, "name=node")
    wait_for_checkpoint(cluster, site, "node", job)
    site.hurry()
    cluster.kill(2)
    try:
        cluster.wait(job, "PENDING", "CONFIGURING")
    finally:
        cluster.start(2)
    known = cluster.wait(job)
    assert (known["JobState"], known["Restarts"]) == ("COMPLETED", "1"), cluster.output(job)
    ended_well("node", [site], one_device, cluster.output(job))
