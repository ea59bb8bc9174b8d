"""A run that survives the loss of workers that an engine has started (launch/keeper.py).

Ranks are killed inside a step, alone or with their machine, cut off and stopped; the others finish it, and end with the
bits of one device.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence

import pytest
from conftest import ROOT, Run, free_port, read_proc, wait_for
from engines.cluster import Cluster
from engines.sites import JOB, SLOW, Site, ended_well, everything
from engines.test_torchrun import Several, is_worker, several, workers

__all__ = ["several"]
FAULTS = str(ROOT / "tests" / "faults.py")
SURVIVES = ("strategy=ddp", *JOB, "survive=true")
MPIRUN = ("mpirun", "-np", "3", "--oversubscribe", "--bind-to", "none")
NIGHTLY = pytest.mark.nightly
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (openmpi-bin)")


def torchrun(node: int, nodes: int, port: int, *program: str, address: str = "127.0.0.1") -> tuple[str, ...]:
    meet = (f"--nnodes={nodes}", f"--node-rank={node}", f"--master-addr={address}", f"--master-port={port}")
    return ("torchrun", *meet, "--nproc-per-node=1", *program)


def agents(site: Site, program: str, *options: str, faults: str = "") -> list[subprocess.Popen[str]]:
    """Start three of torchrun's agents on this machine, with a worker each."""
    port, env = free_port(), {"FAULT": faults}
    commands = [torchrun(node, 3, port, program, *SURVIVES, *options) for node in range(3)]
    return [site.start(*command, env=env) for command in commands]


def survived(name: str, sites: Sequence[Site], deaths: int, one_device: Run, *runs: Run) -> None:
    """Check that a run has lost workers, and that nobody could tell from its end."""
    output = everything(*runs)
    summary = ended_well(name, sites, one_device, output)
    assert summary["restarts"] == deaths, output
    assert summary["layout"]["devices"] * summary["layout"]["num_nodes"] == 3 - deaths
    assert output.count("model mnist_cnn") == 1, output


@pytest.mark.parametrize(
    "faults", ["worker@sum:7,zero@piece:20", pytest.param("zero@sum:7,worker@validation:22", marks=NIGHTLY)]
)
def test_ranks_of_torchrun_die_inside_a_step(site: Site, one_device: Run, faults: str) -> None:
    """Rank zero is that of the machine with torchrun's store. What is left ends at once: no agent waits for others."""
    processes = agents(site, FAULTS, f"outputs={site.outputs}", "name=died", faults=faults)
    runs = [site.finish(process) for process in processes]
    deaths = len(faults.split(","))
    assert sorted(run.returncode for run in runs) == sorted([1] * deaths + [0] * (3 - deaths)), everything(*runs)
    survived("died", [site], deaths, one_device, *runs)


@pytest.mark.parametrize("wrong", [pytest.param("skip", marks=NIGHTLY), "without"])
def test_a_step_that_is_not_whole_is_seen(site: Site, one_device: Run, wrong: str) -> None:
    """Controls: the dead rank's step is dropped, or taken without its samples."""
    faults = f"worker@sum:7,{wrong}@resumed"
    processes = agents(site, FAULTS, f"outputs={site.outputs}", "name=control", faults=faults)
    runs = [site.finish(process) for process in processes]
    with pytest.raises(AssertionError, match="weights_sha256"):
        survived("control", [site], 1, one_device, *runs)


def test_a_worker_dies_with_its_agent(site: Site, one_device: Run) -> None:
    processes = agents(site, "src/train.py", SLOW, "name=agent")
    site.wait_for_checkpoint("agent", processes[0])
    (worker,) = workers(processes[1])
    for pid in (processes[1].pid, worker):
        os.kill(pid, signal.SIGKILL)
    site.wait_for_checkpoint("agent", processes[0])
    site.hurry()
    runs = [site.finish(process) for process in processes]
    assert [run.returncode for run in runs] == [0, -signal.SIGKILL, 0], everything(*runs)
    survived("agent", [site], 1, one_device, *runs)


def test_machines_are_cut_off_and_lost(several: Several, one_device: Run) -> None:
    """Without a shared folder. What was cut off ends when it hears of the others again, and has not written since."""
    port, address = 29510, several.machines.address(0)
    options = ("src/train.py", *SURVIVES, SLOW, "name=cut", "hang_timeout=8")
    processes = [site.start(*torchrun(node, 3, port, *options, address=address)) for node, site in places(several)]
    first = several.sites[0]
    first.wait_for_checkpoint("cut", processes[0])
    (worker,) = [pid for pid in several.machines.processes(2) if is_worker(pid)]
    several.machines.link(2, up=False)
    for _ in range(3):  # one may have been under way
        first.wait_for_checkpoint("cut", processes[0])
    several.machines.link(2, up=True)
    wait_for(lambda: not read_proc(worker, "cmdline"), processes[0], 60)
    several.kill(1)
    first.wait_for_checkpoint("cut", processes[0])
    several.hurry()
    runs = several.finish(processes)
    assert runs[0].returncode == 0, everything(*runs)
    survived("cut", several.sites, 2, one_device, *runs)


def places(several: Several) -> list[tuple[int, Site]]:
    return list(enumerate(several.sites))


def test_a_stopped_rank_zero_counts_as_dead(site: Site, one_device: Run) -> None:
    processes = agents(site, "src/train.py", SLOW, "name=stopped", "hang_timeout=8")
    site.wait_for_checkpoint("stopped", processes[0])
    os.kill(workers(processes[0])[0], signal.SIGSTOP)
    site.wait_for_checkpoint("stopped", processes[1])
    site.hurry()
    runs = [site.finish(process) for process in processes]
    assert [run.returncode for run in runs] == [1, 0, 0], everything(*runs)
    survived("stopped", [site], 1, one_device, *runs)
    assert "rank 0 did not join the other ranks within 8 s (hang_timeout)" in everything(*runs)


@needs_mpirun
def test_ranks_of_mpirun_die_inside_a_step(site: Site, one_device: Run) -> None:
    """Which ends all of them without its option, so that is refused."""
    options = (f"outputs={site.outputs}", "name=mpi")
    env = {"FAULT": "worker@sum:7,zero@piece:20"}
    run = site.run(*MPIRUN, "--enable-recovery", "python", FAULTS, *SURVIVES, *options, env=env)
    survived("mpi", [site], 2, one_device, run)
    refused = site.run(*MPIRUN, "python", "src/train.py", *SURVIVES, "name=refused")
    assert refused.returncode == 2, str(refused)
    right = "error: survive=true: mpirun would end all ranks when one dies: give mpirun --enable-recovery"
    assert everything(refused).count(right) == 1, str(refused)


def test_a_task_of_slurm_dies(cluster: Cluster, site: Site, one_device: Run) -> None:
    tasks = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "scripts/slurm.sh")
    job = cluster.submit(site, *tasks, *SURVIVES[1:], SLOW, "name=task")
    cluster.wait_until(job, lambda: site.saved("task") > 0)
    (*_, worker) = [pid for pid in cluster.machines.processes(2) if is_worker(pid)]
    os.kill(worker, signal.SIGKILL)
    saved = site.saved("task")
    cluster.wait_until(job, lambda: site.saved("task") > saved)
    site.hurry()
    cluster.wait(job)
    summary = ended_well("task", [site], one_device, cluster.output(job))
    assert (summary["restarts"], summary["layout"]["devices"]) == (1, 3), cluster.output(job)


def test_a_torchrun_that_starts_workers_again_is_refused(site: Site) -> None:
    run = site.run("torchrun", "--nproc-per-node=2", "--max-restarts=1", "src/train.py", *SURVIVES, "name=refused")
    right = "error: survive=true: torchrun would start a dead worker again, which the others do not wait for"
    assert everything(run).count(right) >= 1, str(run)
    assert "exitcode  : 2" in run.stderr, str(run)
    assert not list(site.outputs.glob("refused/*"))
