"""torchrun: one machine, several without a shared folder, and a number of machines that changes while a run goes on."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from conftest import Run, read_proc
from engines.sites import BAD, JOB, SLOW, Site, ended_well, everything, refused_once
from network.machines import Machines

RESTARTED = ("torchrun", "--nproc-per-node=2", "--max-restarts=1", "src/train.py", "strategy=ddp")
TWO_WORKERS = ("torchrun", "--nproc-per-node=2", "src/train.py", "strategy=ddp")
PORT = 29500


class Several:
    """Sites on several machines, of which none sees another one's folder, and a run on them."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines = machines
        homes = [folder / name for name in machines.names]
        self.sites = [
            Site(home, partial(machines.command, index, hidden=[other for other in homes if other != home]))
            for index, home in enumerate(homes)
        ]

    def start(self, index: int, *options: str, endpoint: str = "", nodes: str = "2") -> subprocess.Popen[str]:
        """Start torchrun on one of the machines, as `lockstep torchrun` does."""
        meet = f"--rdzv-endpoint={endpoint or self.machines.names[0]}:{PORT}"
        torchrun = ("lockstep", "torchrun", f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=100", meet)
        return self.sites[index].start(*torchrun, "src/train.py", "strategy=ddp", *JOB, *options)

    def finish(self, processes: list[subprocess.Popen[str]]) -> list[Run]:
        return [site.finish(process) for site, process in zip(self.sites, processes, strict=False)]

    def kill(self, index: int) -> None:
        """Kill all that runs on a machine, as if its power failed."""
        self.machines.kill(index)

    def kill_worker(self, index: int) -> None:
        """Kill the worker of a machine, and leave its agent alone."""
        (worker, *_) = [pid for pid in self.machines.processes(index) if is_worker(pid)]
        os.kill(worker, signal.SIGKILL)

    def hurry(self) -> None:
        for site in self.sites:
            site.hurry()

    def copies(self) -> list[set[str]]:
        """Return the names of the checkpoints on each machine."""
        return [{file.name for file in site.outputs.rglob("*.ckpt")} for site in self.sites]


@pytest.fixture
def several(machines: Machines, tmp_path: Path) -> Iterator[Several]:
    yield Several(machines, tmp_path)
    for index in range(len(machines.names)):
        machines.kill(index)
        machines.link(index, up=True)


def is_worker(pid: int) -> bool:
    return "src/train.py" in read_proc(pid, "cmdline") and "torchrun" not in read_proc(pid, "cmdline")


def workers(agent: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of an agent's workers."""
    children = read_proc(agent.pid, f"task/{agent.pid}/children").split()
    return [int(pid) for pid in children if is_worker(int(pid))]


def test_sharded_weights_have_the_same_bits(site: Site, one_device: Run) -> None:
    command = ("torchrun", "--nproc-per-node=2", "src/train.py", "strategy=fsdp", "strategy.reshard=true")
    run = site.run(*command, *JOB, "name=sharded")
    assert run.returncode == 0, str(run)
    summary = ended_well("sharded", [site], one_device, everything(run))
    assert summary["layout"]["strategy"] == "fsdp"


def test_a_killed_worker_is_started_again(site: Site, one_device: Run) -> None:
    process = site.start(*RESTARTED, *JOB, SLOW, "name=killed")
    site.wait_for_checkpoint("killed", process)
    os.kill(workers(process)[1], signal.SIGKILL)
    site.wait_for_checkpoint("killed", process)
    site.hurry()
    run = site.finish(process)
    assert run.returncode == 0, str(run)
    summary = ended_well("killed", [site], one_device, everything(run))
    assert summary["restarts"] == 1
    assert (summary["layout"]["devices"], summary["layout"]["num_nodes"]) == (2, 1), "as torchrun has started them"
    assert run.stderr.count("resumes after step") == 1


def test_workers_are_forks(several: Several, one_device: Run) -> None:
    """`lockstep torchrun`: a killed fork is replaced by another one, and no process outlives a killed agent."""
    site, endpoint = several.sites[0], f"--rdzv-endpoint={several.machines.names[0]}:{PORT}"
    engine = ("lockstep", "torchrun", "--nproc-per-node=2", "--max-restarts=1", "--rdzv-id=kept", "--nnodes=1")
    forks = (*engine, endpoint, "src/train.py", "strategy=ddp", *JOB, SLOW, "name=forks")
    process = site.start(*forks)
    folder = site.wait_for_checkpoint("forks", process)
    assert folder.name.startswith("kept_"), "--rdzv-id names the folder"
    os.kill(forks_of(process)[1], signal.SIGKILL)
    site.wait_for_checkpoint("forks", process)
    workers_left = [*forks_of(process), *workers(process)]
    os.kill(process.pid, signal.SIGKILL)
    site.finish(process)
    until = time.monotonic() + 5
    while any(read_proc(pid, "cmdline") for pid in workers_left):
        assert time.monotonic() < until, "a worker outlives its agent"
        time.sleep(0.05)

    site.hurry()
    again = site.run(*forks)
    assert again.returncode == 0, str(again)
    assert again.stderr.count("resumes after step") == 1, "the same command continues its run"
    ended_well("forks", [site], one_device, everything(again))


def forks_of(agent: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of an agent's workers, which are children of its server."""
    for child in read_proc(agent.pid, f"task/{agent.pid}/children").split():
        if not is_worker(int(child)):
            return [int(pid) for pid in read_proc(int(child), f"task/{child}/children").split()]
    return []


def test_sigterm_saves_and_bad_input_is_refused(site: Site, one_device: Run) -> None:
    process = site.start(*TWO_WORKERS, *JOB, SLOW, "name=stopped")
    folder = site.wait_for_checkpoint("stopped", process)
    os.kill(process.pid, signal.SIGTERM)
    assert site.finish(process).returncode == 1, "torchrun's own"
    site.hurry()
    again = site.run(*TWO_WORKERS, f"resume={folder}")
    assert again.returncode == 0, str(again)
    ended_well("stopped", [site], one_device, everything(again))

    refused = site.run(*TWO_WORKERS, *JOB, BAD, "name=refused")
    assert refused_once(everything(refused)), str(refused)
    assert "exitcode  : 2" in refused.stderr, "of the workers"
    assert not list(site.outputs.glob("refused/*"))


def test_two_machines_without_a_shared_folder(several: Several, one_device: Run) -> None:
    """Their own names are loopback addresses to them; the endpoint is the address of the second one."""
    processes = [several.start(index, "name=two", endpoint=several.machines.address(1)) for index in range(2)]
    runs = several.finish(processes)
    assert [run.returncode for run in runs] == [0, 0], everything(*runs)
    ended_well("two", several.sites[:2], one_device, everything(*runs))
    assert several.copies() == [{"last.ckpt", "best.ckpt"}] * 2 + [set()]


def test_machines_come_and_go(several: Several, one_device: Run) -> None:
    """A worker is killed, then a machine; it comes back; a link is cut and mended. Five groups of workers, of two and
    three machines, take the steps of one device."""
    task = ("name=elastic", SLOW, "hang_timeout=12")
    processes = [several.start(index, *task, nodes="1:3") for index in range(3)]
    first = several.sites[0]
    first.wait_for_checkpoint("elastic", processes[0])
    several.kill_worker(1)
    first.wait_for_checkpoint("elastic", processes[0])
    several.kill(2)
    first.wait_for_checkpoint("elastic", processes[0])
    several.sites[2].finish(processes[2])
    processes[2] = several.start(2, *task, nodes="1:3")
    several.sites[2].wait_for_checkpoint("elastic", processes[2])
    several.machines.link(1, up=False)
    first.wait_for_checkpoint("elastic", processes[0])
    several.machines.link(1, up=True)
    several.sites[1].wait_for_checkpoint("elastic", processes[1])
    several.hurry()
    runs = several.finish(processes)
    assert [run.returncode for run in runs] == [0] * 3, everything(*runs)
    ended_well("elastic", several.sites, one_device, everything(*runs))


def test_the_machine_that_hosts_the_store_is_lost(several: Several, one_device: Run) -> None:
    """Then torchrun ends on all machines. Those that are left have the newest checkpoint, and go on at another
    endpoint."""
    processes = [several.start(index, "name=host", SLOW, nodes="3") for index in range(3)]
    for index, process in enumerate(processes):
        several.sites[index].wait_for_checkpoint("host", process)
    several.kill(0)
    several.hurry()
    assert [run.returncode for run in several.finish(processes)[1:]] == [1, 1]
    endpoint = several.machines.names[1]
    left = [several.start(index, "name=host", "resume=last", endpoint=endpoint) for index in (1, 2)]
    runs = [several.sites[index].finish(process) for index, process in zip((1, 2), left, strict=True)]
    assert [run.returncode for run in runs] == [0, 0], everything(*runs)
    assert everything(*runs).count("resumes after step") == 1
    ended_well("host", several.sites[1:], one_device, everything(*runs))


def test_an_endpoint_that_has_no_address_is_refused_in_one_line(several: Several) -> None:
    unknown = several.sites[0].run("lockstep", "torchrun", "--rdzv-endpoint=nobody.invalid:29500", "src/train.py")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1), str(unknown)
    assert "nobody.invalid: this machine can't resolve the name" in unknown.stderr
