"""`breakpoint()` in a worker: it has the command's standard input, and elsewhere one line says what to give."""

import os
import subprocess
import sys

import pytest

from lockstep.errors import UserError, WorkerFailed
from lockstep.launch import breakpoints
from lockstep.step.trial import _without_breakpoints

WORKER = """
import multiprocessing
from lockstep.launch import breakpoints

def work(workers):
    value = 42
    breakpoints.allow(workers)
    breakpoint()
    print("after", value)

worker = multiprocessing.get_context("fork").Process(target=work, args=({workers},))
worker.start()
worker.join()
"""


def run_worker(workers: int, typed: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WORKER.format(workers=workers)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"}
    return subprocess.run(
        command, input=typed, capture_output=True, text=True, timeout=60, check=False, env=environment
    )


@pytest.mark.usefixtures("processes")
def test_the_only_worker_of_a_run_reads_what_the_user_types() -> None:
    done = run_worker(1, "p value + 1\nvalue = 5\nc\n")
    assert "(Pdb) 43" in done.stdout
    assert "after 5" in done.stdout


@pytest.mark.usefixtures("processes")
def test_several_workers_are_refused_in_one_line() -> None:
    done = run_worker(2, "c\n")
    assert "UserError: breakpoint() in " in done.stderr
    assert "<string>:8: 2 workers can't share a terminal: give devices=1 to debug" in done.stderr
    assert "Pdb" not in done.stdout


def test_a_debugger_of_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "ipdb.set_trace")
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    breakpoints.allow(2)
    assert sys.breakpointhook is sys.__breakpointhook__


def test_a_loaders_process_has_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    monkeypatch.setattr(sys, "stdin", sys.stdin)
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    breakpoints.allow(1)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(UserError, match=r"test_breakpoints\.py:\d+: a loader's process .*: give num_workers=0"):
        breakpoint()


def test_the_trial_before_the_first_step_does_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[int] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(1))
    with _without_breakpoints():
        breakpoint()
    assert not stops
    breakpoint()
    assert stops


def test_a_debugger_that_was_quit_is_no_failure_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: True)
    quit_ = breakpoints.error_of_quit(1)
    assert (type(quit_), str(quit_), getattr(quit_, "may_restart", None)) == (
        WorkerFailed,
        "the debugger was quit",
        False,
    )
    assert "give devices=1" in str(breakpoints.error_of_quit(3))
