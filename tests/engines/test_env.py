"""Any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (`env://`): here, a hand."""

import os
import signal
import subprocess

import pytest
from conftest import Run, free_port
from engines.sites import BAD, JOB, SLOW, Site, ended_well, everything, refused_once


def start(site: Site, count: int, *options: str) -> list[subprocess.Popen[str]]:
    meet = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{**meet, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return [site.start("python", "src/train.py", *options, env=rank) for rank in ranks]


def test_two_ranks_are_stopped_and_started_again(site: Site, one_device: Run) -> None:
    processes = start(site, 2, "strategy=ddp", *JOB, SLOW, "name=stopped")
    folder = site.wait_for_checkpoint("stopped", processes[0])
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
    runs = [site.finish(process) for process in processes]
    assert [run.returncode for run in runs] == [143, 143], everything(*runs)
    site.hurry()
    runs = [site.finish(process) for process in start(site, 2, f"resume={folder}")]
    assert [run.returncode for run in runs] == [0, 0], everything(*runs)
    assert not runs[1].stdout + runs[1].stderr, "rank zero speaks"
    summary = ended_well("stopped", [site], one_device, everything(*runs))
    assert (summary["layout"]["devices"], summary["layout"]["num_nodes"]) == (2, 1), "as they were started"


def test_bad_input_is_refused_once(site: Site) -> None:
    runs = [site.finish(process) for process in start(site, 2, "strategy=ddp", *JOB, BAD, "name=refused")]
    assert [run.returncode for run in runs] == [2, 2], everything(*runs)
    assert refused_once(everything(*runs)), everything(*runs)
    assert not list(site.outputs.glob("refused/*"))


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "job"},
    ],
    ids=",".join,
)
def test_one_of_several_processes_that_nobody_can_place_is_refused(site: Site, variables: dict[str, str]) -> None:
    """Else each of them were a rank zero, in a folder of its own."""
    run = site.run("python", "src/train.py", *JOB, "name=unknown", env=variables)
    assert run.returncode == 2, str(run)
    assert run.stderr.startswith("error: "), str(run)
    assert len(run.stderr.splitlines()) == 1, str(run)
    assert any(name in run.stderr for name in variables), "it names what is set"
    assert not list(site.outputs.glob("unknown/*"))


def test_several_machines_without_an_engine_are_refused_with_the_command_to_type(site: Site) -> None:
    run = site.run("python", "src/train.py", *JOB, "strategy=ddp", "num_nodes=2", "devices=2", "name=none")
    assert run.returncode == 2, str(run)
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: num_nodes=2")
    for word in ("torchrun", "--nnodes=2", "--nproc-per-node=2", "src/train.py", "exact=true", "name=none"):
        assert word in line, line
