"""Promise 6 without a restart: workers of a run with `survive=true` die, and the others go on to the same bits.

scripts/lab/chaos.py --deaths does it at random; launch/test_survival.py does it where nobody trains.
"""

import os
import signal
import sys

import pytest
from conftest import SAVES_OFTEN, Program, Run, checkpoint_of, wait_for, workers_of
from refusals import checked

from lockstep import UserError

SAVES = tuple(each for each in SAVES_OFTEN if each != "logger=none")
EXACT = (*SAVES, "max_epochs=3", "exact=true", "pieces=4")  # 36 steps
JOB = (*EXACT, "strategy=ddp", "survive=true", "logger=tensorboard")
ONE_EACH = "zero@start:0,worker@piece:4,zero@sum:7,worker@summed:9,zero@validation:24,worker@sum:26,zero@test:36"


@pytest.fixture(scope="module")
def undisturbed(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Program(tmp_path_factory.mktemp("undisturbed") / "outputs")(*EXACT, "logger=none")


def survived(run: Run, deaths: int, left: int, undisturbed: Run) -> None:
    """Check that a run has lived through deaths, and that nobody could tell from its end."""
    assert run.returncode == 0, str(run)
    lines = [line for line in run.stderr.splitlines() if "was killed by SIGKILL" in line]
    assert len(lines) == deaths == run.summary["restarts"], str(run)
    assert (run.summary["layout"]["devices"], run.summary["status"]) == (left, "completed")
    for key in ("weights_sha256", "metrics", "steps", "samples_seen"):
        assert run.summary[key] == undisturbed.summary[key], key
    assert checkpoint_of(run.folder)["global_step"] == checkpoint_of(undisturbed.folder)["global_step"]
    assert not [*run.folder.rglob(".*.tmp")]


def test_new_workers_join_the_others(run_train: Program, undisturbed: Run) -> None:
    """Seven deaths at moments of all kinds, of rank zero and of others."""
    program = Program(run_train.outputs, "tests/faults.py")
    run = program(*JOB, "devices=3", "max_restarts=9", env={"FAULT": ONE_EACH})
    survived(run, 7, 3, undisturbed)
    assert "continuing with 3 of 3 workers, 2 restarts left" in run.stderr


def test_fewer_workers_go_on_in_their_processes(run_train: Program, undisturbed: Run) -> None:
    """The last worker of four ends the run. It is one of the first: nobody was started anew."""
    program = Program(run_train.outputs, "tests/faults.py")
    faults = "worker@saving:9,worker@sum:20,zero@saved:30"  # the rank that saves is rank zero
    process = program.start(*JOB, "devices=4", env={"FAULT": faults})
    pids = wait_for(lambda: actual if len(actual := workers_of(process)) == 4 else [], process)
    seen = wait_for(lambda: actual if len(actual := workers_of(process)) == 1 else [], process)
    run = program.finish(process)
    survived(run, 3, 1, undisturbed)
    assert (run.stderr.count("model mnist_cnn"), run.stderr.count("resumes after step")) == (1, 3), str(run)
    assert {*seen} < {*pids}


@pytest.mark.parametrize("wrong", ["skip", "without", "forget"])
def test_a_step_that_is_not_whole_is_seen(run_train: Program, undisturbed: Run, wrong: str) -> None:
    """Controls: the dead rank's step is dropped, or taken without its samples, or the optimizer starts again."""
    program = Program(run_train.outputs, "tests/faults.py")
    run = program(*JOB, "devices=3", env={"FAULT": f"worker@sum:7,{wrong}@resumed"})
    assert run.summary["restarts"] == 1
    assert run.summary["weights_sha256"] != undisturbed.summary["weights_sha256"]


@pytest.mark.parametrize(("what", "alive"), [("count", 0), pytest.param("keep", 2, marks=pytest.mark.nightly)])
def test_survivors_free_what_earlier_trainers_had(run_train: Program, what: str, alive: int) -> None:
    program = Program(run_train.outputs, "tests/faults.py")
    run = program(*JOB, "devices=3", env={"FAULT": f"worker@sum:4,worker@piece:8,{what}@trainers"})
    counts = [line for line in run.stderr.splitlines() if line.endswith("of 2 earlier Trainers are alive")]
    assert counts == [f"{alive} of 2 earlier Trainers are alive"], str(run)


@pytest.mark.nightly
def test_a_stopped_rank_zero_counts_as_dead_and_writes_nothing(run_train: Program, undisturbed: Run) -> None:
    process = run_train.start(*JOB, "devices=3", "hang_timeout=20")
    run_train.wait_for_checkpoint(process)
    os.kill(workers_of(process)[0], signal.SIGSTOP)
    run = run_train.finish(process)
    assert "rank 0 did not join the other ranks within 20 s (hang_timeout)" in run.stderr
    assert run.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on = ("survive=true", "exact=true", "devices=2")
    assert checked(*on).survive
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match=r"^survive=true and darwin don't go together: only Linux lists a process's"):
        checked(*on)
