"""Promise 6 without a user: workers that die or hang come back, and those that don't are done without."""

import json
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from conftest import SAVES_OFTEN as JOB
from conftest import Process, Program, Run, wait_for, workers_of


def strike(program: Program, process: Process, rank: int, signum: int, workers: int) -> None:
    """Signal a worker, once there are so many and the run has saved since they began."""
    pids = wait_for(lambda: actual if len(actual := workers_of(process)) == workers else [], process)
    began = time.time()
    wait_for(lambda: any(p.stat().st_mtime > began for p in program.outputs.rglob("last.ckpt")), process)
    os.kill(pids[rank], signum)
    wait_for(lambda: not set(pids) & set(workers_of(process)), process)


@pytest.mark.nightly
def test_restarts_in_a_row_after_silence_and_kills(run_train: Program, undisturbed: Run) -> None:
    exact = ("exact=true", "pieces=4", "strategy=ddp", "devices=2")
    process = run_train.start(*JOB, *exact, "max_restarts=3", "checkpoint_every=1", "hang_timeout=6")
    strike(run_train, process, 1, signal.SIGSTOP, workers=2)
    for rank in (0, 1):
        strike(run_train, process, rank, signal.SIGKILL, workers=2)
    run = run_train.finish(process)
    assert run.returncode == 0, str(run)
    assert "rank 1 did not join the other ranks within 6 s (hang_timeout): it was at " in run.stderr
    assert f"its stack is in {run.folder / 'rank_1.log'}" in run.stderr
    assert "the worker hung and was killed; its stack:" in (run.folder / "rank_1.log").read_text()
    assert run.summary["restarts"] == 3
    assert run.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]


def test_fewer_workers_go_on(run_train: Program, undisturbed: Run) -> None:
    process = run_train.start(*JOB, "exact=true", "pieces=4", "strategy=ddp", "devices=3", "elastic=true")
    strike(run_train, process, 2, signal.SIGKILL, workers=3)
    strike(run_train, process, 0, signal.SIGKILL, workers=2)
    run = run_train.finish(process)
    assert run.returncode == 0, str(run)
    for left in (2, 1):
        assert f"continuing with {left} of 3 workers" in run.stderr
    assert run.summary["restarts"] == 2
    assert run.summary["layout"]["devices"] == 1
    assert run.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    assert len(run.folders) == 1


def test_a_long_name_of_the_temporary_folder_does_not_hang_the_loaders(run_train: Program, tmp_path: Path) -> None:
    """A socket that loader processes hand tensors over by does not fit into such a folder."""
    long = tmp_path / ("long" * 30)
    long.mkdir()
    run_train(*JOB, "max_epochs=1", "num_workers=1", env={"TMPDIR": str(long)})


def test_what_was_killed_leaves_no_temporary_files(run_train: Program) -> None:
    """Nor do its loader processes: the next run on the machine removes their sockets, too."""
    with tempfile.TemporaryDirectory() as folder:  # of a short name
        process = run_train.start(*JOB, "num_workers=1", env={"TMPDIR": folder})
        wait_for(lambda: [*Path(folder).glob("lockstep_*/pymp-*/*")], process)
        run_train.kill(process)
        time.sleep(1)  # what is younger may be about to be locked
        run_train(*JOB, "max_epochs=1", "num_workers=1", env={"TMPDIR": folder})
        assert not [*Path(folder).glob("lockstep_*"), *Path(folder).glob("pymp-*")]


def test_a_run_reports_what_made_it(undisturbed: Run) -> None:
    actual = json.loads((undisturbed.folder / "provenance.json").read_text())
    assert actual["config"]["batch_size"] == 32
    assert "exact=true" in actual["command"]
    assert len(actual["git"]["commit"]) == 40
    assert ((undisturbed.folder / "git.diff").exists() or bool(actual["untracked"])) == actual["git"]["dirty"]
    assert {"torch", "lightning"} <= actual["versions"].keys()
    assert actual["machine"]["threads"] == 1
    assert len(actual["data_fingerprint"]) == 64
