"""A folder has one run at a time: a second process is refused, names the first, and changes nothing."""

import os
import platform
import re
import signal
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from conftest import LONG_RUN, Program, ended, wait_for, workers_of

from lockstep.job import run_folder
from lockstep.job.run_folder import FolderBusy, lock_folder
from lockstep.trainer import lock

pytestmark = pytest.mark.usefixtures("processes")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*.yaml")}


def test_a_folder_has_one_run_until_its_process_ends(run_train: Program, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run_train.start(*LONG_RUN, "strategy=ddp", "devices=2", f"hydra.run.dir={folder}")
    wait_for((folder / ".hydra" / "overrides.yaml").exists, first)
    before = contents(folder)
    assert before
    busy = rf"error: {folder}: process {first.pid} on {platform.node()} \(since 20.*\) works in this folder: "
    again = run_train(*LONG_RUN, "seed=1", f"hydra.run.dir={folder}", ok=False)  # before it has made a step, perhaps
    assert again.returncode == 2
    assert re.match(busy, again.stderr), again
    assert contents(folder) == before
    wait_for((folder / "checkpoints" / "last.ckpt").exists, first)
    resumed = run_train(f"resume={folder}", "lr=0.5", ok=False)
    assert (resumed.returncode, bool(re.match(busy, resumed.stderr))) == (2, True), resumed
    assert contents(folder) == before
    workers = workers_of(first)
    assert len(workers) == 2
    first.kill()
    last = run_train(f"resume={folder}", "max_steps=1", ok=False)  # at once: what a killed run leaves means nothing
    assert (last.returncode, "ends the run after step 1, but" in last.stderr) == (2, True), last
    assert all(map(ended, workers)), "none outlives its parent"
    assert (folder / run_folder.LOCK).exists()


def test_a_sweep_that_runs_is_not_resumed(run_train: Program, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    first = run_train.start(*LONG_RUN, "lr=0.1,0.2", "-m", f"hydra.sweep.dir={folder}")
    wait_for((folder / "0" / "checkpoints" / "last.ckpt").exists, first)
    before = contents(folder)
    second = run_train(f"sweep.resume={folder}", "seed=3", ok=False)
    assert second.returncode == 2
    assert f"error: {folder}: process {first.pid} on" in second.stderr
    assert contents(folder) == before
    job = run_train(f"resume={folder}/0", ok=False)
    assert (job.returncode, "works in this folder" in job.stderr) == (2, True)
    first.send_signal(signal.SIGTERM)
    assert run_train.finish(first).returncode == 143


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failed_worker_of_an_engine_keeps_the_lock_until_its_end(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still have files of the folder open. Without an engine, the parent runs the next job of a sweep."""
    monkeypatch.setattr(run_folder, "external_workers", lambda: workers)
    monkeypatch.setattr(run_folder, "broadcast_from_rank_zero", lambda value: value)
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.1)

    def fail() -> None:
        with lock_folder(tmp_path / "run"):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    if (pid := os.fork()) == 0:
        try:
            with lock_folder(tmp_path / "run"):
                os._exit(0)
        except FolderBusy:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (3 if workers else 0)


def hold(folder: Path, forks: Any, released: Any) -> None:
    """Take the lock as a parent, whose worker closes what it has inherited and outlives it."""
    with lock_folder(folder):
        if os.fork() == 0:
            os.closerange(3, 256) if forks == "closing" else None
            time.sleep(60)
            os._exit(0)
        released.set()
        time.sleep(60)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("worker", ["closing", "keeping"])
def test_the_lock_is_the_parents_alone(tmp_path: Path, worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.3)
    context = get_context("fork")
    released = context.Event()
    parent = context.Process(target=hold, args=(tmp_path, worker, released))
    parent.start()
    assert released.wait(30)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    try:
        with pytest.raises(FolderBusy, match=f"process {parent.pid} on"), lock_folder(tmp_path):
            pass
        parent.kill()
        parent.join()
        assert not ended(int(children[0]))  # the worker lives, and holds nothing
        with lock_folder(tmp_path), lock_folder(tmp_path):  # a second time by the same process
            pass
    finally:
        parent.kill()
        for child in children:
            os.kill(int(child), signal.SIGKILL)


def test_a_folder_that_was_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "run"):
        (tmp_path / "run" / run_folder.LOCK).unlink()
        pid = os.fork()
        if pid == 0:
            with lock_folder(tmp_path / "run"):
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
