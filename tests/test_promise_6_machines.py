"""Promise 6 over several machines: one that is lost is named and done without, and may come back."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
from conftest import Run, wait_for, workers_of
from several import JOB, Site, ended_well, hurry

pytestmark = pytest.mark.slow
LONG = ("max_epochs=100000", "checkpoint_every=20")


@pytest.fixture(autouse=True)
def nothing_left(site: Site) -> Iterator[None]:
    """A test that fails leaves no run to the next one."""
    hurry(site, on=False)
    yield
    for index in range(len(site.names)):
        site.kill(index)
        site.machines.link(index, up=True)


@pytest.mark.parametrize("lost", ["killed", "unplugged"])
def test_a_machine_that_is_lost_is_named(site: Site, lost: str) -> None:
    processes = site.start_all(*LONG, "name=lost", "machine_timeout=8", count=2)
    site.saved(0, processes[0])
    if lost == "killed":
        site.kill(1)
    else:
        site.machines.link(1, up=False)
    first = site.finish(0, processes[0])
    site.machines.link(1, up=True)
    second = site.finish(1, processes[1])
    reason = "it closed the connection" if lost == "killed" else "not a word of it for 8 s"
    said = f"machine {site.names[1]} ({site.machines.address(1)}) was lost: {reason}"
    assert first.returncode == 1, str(first)
    assert f"error: {said}" in first.stderr
    assert "onnection reset" not in first.stderr
    summary = max(first.outputs.glob("lost/*/summary.json"), key=lambda file: file.stat().st_mtime).read_text()
    assert said in summary
    assert '"status": "failed"' in summary
    if lost == "unplugged":
        assert second.returncode == 1, str(second)
        keeper = f"machine {site.names[0]} ({site.names[0]}:29500), which keeps the run,"
        assert f"error: {keeper} was lost: not a word of it for 8 s" in second.stderr


def test_a_link_that_is_down_for_five_seconds_is_no_loss(site: Site, undisturbed: Run) -> None:
    processes = site.start_all("name=short", count=2)
    site.saved(0, processes[0])
    site.machines.link(1, up=False)
    time.sleep(5)
    site.machines.link(1, up=True)
    summary = ended_well(site.finish_all(processes), "short")
    assert summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    assert summary["restarts"] == 0


def test_those_that_are_left_go_on_and_one_that_comes_back_takes_part(site: Site, undisturbed: Run) -> None:
    task = ("name=elastic", "elastic=true", "callbacks=[default,slow]")
    processes = site.start_all(*task)
    site.saved(0, processes[0])
    site.kill(2)
    site.finish(2, processes[2])
    site.saved(0, processes[0])
    met = ("num_nodes=3", f"rdzv_endpoint={site.names[0]}:29500", "strategy=ddp")
    processes[2] = site.start(2, *JOB, *met, *task)
    log = next(site.homes[0].glob("outputs/elastic/*/train.log"))
    wait_for(lambda: log.read_text().count(" of 3 nodes, exact") == 2, processes[0])
    hurry(site)
    summary = ended_well(site.finish_all(processes), "elastic")
    assert summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    assert [log.read_text().count(f" of {count} nodes, exact") for count in (3, 2)] == [2, 1]


def test_the_machine_that_keeps_the_run_comes_back(site: Site, undisturbed: Run) -> None:
    task = ("name=kept", "max_restarts=1", "callbacks=[default,slow]")
    processes = site.start_all(*task, count=2)
    site.saved(0, processes[0])
    site.kill(0)
    site.finish(0, processes[0])
    met = ("num_nodes=2", f"rdzv_endpoint={site.names[0]}:29500")
    hurry(site)
    processes[0] = site.start(0, "resume=last", *met)
    summary = ended_well(site.finish_all(processes), "kept")
    assert summary["weights_sha256"] == undisturbed.summary["weights_sha256"]


def test_a_worker_that_fails_is_named_on_all_machines(site: Site) -> None:
    processes = site.start_all(*LONG, "name=worker", count=2)
    site.saved(0, processes[0])
    (worker,) = wait_for(lambda: workers_of(processes[1]), processes[1])
    os.kill(worker, signal.SIGKILL)
    for run in site.finish_all(processes):
        assert run.returncode == 1, str(run)
        assert f"error: rank 1 on {site.names[1]} was killed by SIGKILL" in run.stderr, str(run)
