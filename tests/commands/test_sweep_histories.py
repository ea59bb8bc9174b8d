"""Whatever has happened to a sweep, its jobs end as if nothing had, and its last lines are right."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import Program
from histories import SHORT, History, budget, failure, outcome, tried
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

JOBS = 3
SWEEP = (
    *("-m", *SHORT, "max_epochs=1", "checkpoint_every=1", "callbacks.checkpoint.monitor=val/loss"),
    *("sweep.metric=val/loss", "seed=1,2,3"),
)
FAULTS = [
    *("job@step:2/1", "kill@step:2/1", "fail@step:2/0", "term@step:1/1", "disk@saving:2/1", "kill@saving:2/2"),
    *("job@saved:3/0", "kill@saved:1/0", "fail@step:1/2", "job@start:0/1", "kill@end:3/1", ""),
]
CODES = {"kill": {0, -9}, "job": {0, 1}, "fail": {0, 1}, "disk": {0, 1}, "term": {0, 143}, "": {0}}
STATUSES = {"job": "failed", "fail": "failed", "disk": "failed", "term": "interrupted"}
# Their programs are started without fixtures, and take a minute.
pytestmark = pytest.mark.usefixtures("run_train")


@cache
def undisturbed(home: Path) -> tuple[dict[str, Any], ...]:
    return tuple(map(outcome, Program(home)(*SWEEP).jobs))


class SweepFolder(History):
    """Starts of one sweep, in which jobs or all are killed, fail or are asked to end."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = [self.folder / str(number) for number in range(JOBS)]

    @initialize(fault=st.sampled_from(FAULTS))
    def begin(self, fault: str) -> None:
        self._start([*SWEEP, f"hydra.sweep.dir={self.folder}"], fault)

    @rule(fault=st.sampled_from(FAULTS))
    def resume(self, fault: str) -> None:
        self._start([f"sweep.resume={self.folder}"], fault)

    @precondition(lambda self: self._unfinished())
    @rule(choice=st.integers(0, JOBS - 1))
    def lose_last(self, choice: int) -> None:
        unfinished = self._unfinished()
        self.shell(f"rm {unfinished[choice % len(unfinished)]}")

    def teardown(self) -> None:
        if not self.failed and self.commands:
            self._start([f"sweep.resume={self.folder}"], "")

    def _unfinished(self) -> list[Path]:
        """Return the last checkpoints of the jobs that are not complete."""
        done = {job for job in self.jobs if self._status(job) == "completed"}
        return [path for job in self.jobs if job not in done and (path := job / "checkpoints" / "last.ckpt").exists()]

    def _status(self, job: Path) -> str:
        return str(outcome(job, parts=("status",))["status"]) if (job / "summary.json").exists() else ""

    def _start(self, how: list[str], fault: str) -> None:
        what, number = fault.partition("@")[0], int(fault.rpartition("/")[2] or 0)
        done = [job for job in self.jobs if self._status(job) == "completed"]
        before = [(job / "summary.json").read_bytes() for job in done]
        run = self.program(*how, fault=fault)
        self.seen[f"{what or 'undisturbed'}: exit {run.returncode}"] += 1
        self.check(run.returncode in CODES[what], f"exit {run.returncode}", run)
        self.check(before == [(job / "summary.json").read_bytes() for job in done], "a complete job ran again", run)
        statuses = [self._status(job) for job in self.jobs]
        for job, status, right in zip(self.jobs, statuses, undisturbed(self.home / "undisturbed"), strict=True):
            if status == "completed":
                self.typed(f"grep weights_sha256 {job}/summary.json  # undisturbed: {right['weights_sha256']}")
                actual = outcome(job)
                differing = [
                    f"{key} {actual[key]} instead of {right[key]}" for key in right if actual[key] != right[key]
                ]
                self.check(not differing, f"job {job.name}: {', '.join(differing)}", run)
        if run.returncode not in (0, -9):
            others = {status for at, status in enumerate(statuses) if at != number} - {""}
            self.check(statuses[number] == STATUSES[what], f"job {number} is {statuses[number]}", run)
            self.check(others <= {"completed", *([] if what != "term" else [""])}, f"other jobs are {others}", run)
            self.check(f"sweep.resume={self.folder}\n" in run.stderr, "not told how to go on", run)
        elif run.returncode == 0:
            self.seen["completed"] += 1
            self._check_summary(run.stderr)

    def _check_summary(self, output: str) -> None:
        losses = [right["val/loss"] for right in undisturbed(self.home / "undisturbed")]
        best = self.jobs[losses.index(min(losses))]
        self.check(all(self._status(job) == "completed" for job in self.jobs), "a job is missing")
        self.check(
            f"best val/loss (smaller is better): {min(losses):.4g} in {best}\n" in output, f"wrong best: {output}"
        )
        self.check(f"{JOBS} runs in {self.folder} |" in output, f"wrong count: {output}")


@pytest.mark.nightly
def test_a_disturbed_sweep_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    seen = tried(SweepFolder, tmp_path, budget(2, 40, steps=3))
    assert seen["completed"] >= seen["histories"], seen


@pytest.mark.nightly
def test_a_job_that_goes_on_wrongly_is_detected(tmp_path: Path) -> None:
    """The control: the first step of a job that resumes is taken back."""

    class Short(SweepFolder):
        begin = resume = lose_last = None  # type: ignore[assignment]

        @precondition(lambda self: not self.commands)
        @rule()
        def killed(self) -> None:
            self._start([*SWEEP, f"hydra.sweep.dir={self.folder}"], "job@saved:2/1")

    output = failure(Short, tmp_path, "skip@resumed")
    assert output.startswith("job 1: weights_sha256"), output
