"""Promise 6: whatever has happened to a run's folder, the run ends with the bits of one that was never disturbed."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Program, Run
from histories import SHORT, History, budget, failure, outcome, step_in, tried
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

JOB = (
    *(*SHORT, "max_epochs=2", "checkpoint_every=2", "checkpoint_keep=-1", "val_every=1"),
    "callbacks.checkpoint.monitor=val/loss",
)
STEPS = 6  # of the run
LAYOUTS = ("strategy=auto devices=1", "strategy=ddp devices=2", "strategy=dp devices=2", "strategy=ddp devices=3")
FAULTS = [
    *("kill@step:3", "worker@step:4", "kill@saving:4", "disk@saving:3", "term@step:2", "kill@saved:2", "kill@step:5"),
    *("kill@validation:3", "kill@end:6", "kill@start:0", "worker@step:1", "kill@saving:2", "disk@saving:6"),
    *("kill@saved:6", "kill@step:1", "kill@step:6", "term@step:4", "fail@step:4", ""),
]
# The exit codes that a start may have: it is not disturbed if it begins behind the fault's step.
CODES = {"kill": {0, -9}, "worker": {0}, "term": {0, 143}, "disk": {0, 1}, "fail": {0, 1}, "": {0}}
# Their programs are started without fixtures, and take a minute.
pytestmark = pytest.mark.usefixtures("run_train")


@cache
def undisturbed(home: Path) -> dict[str, Any]:
    return outcome(Program(home)(*JOB).folder)


class RunFolder(History):
    """Starts of one run, on changing layouts, and what happens to its files between them."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.best = (self.folder / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))

    @initialize(fault=st.sampled_from(FAULTS), layout=st.sampled_from(LAYOUTS))
    def begin(self, fault: str, layout: str) -> None:
        self._start([*JOB, f"hydra.run.dir={self.folder}"], layout, fault)

    @rule(fault=st.sampled_from(FAULTS), layout=st.sampled_from(LAYOUTS))
    def resume(self, fault: str, layout: str) -> None:
        self._start([f"resume={self.folder}"], layout, fault)

    @rule(fault=st.sampled_from(FAULTS), layout=st.sampled_from(LAYOUTS))
    def start_again(self, fault: str, layout: str) -> None:
        """Type the first command once more: the folder has a run, which goes on."""
        self._start([*JOB, f"hydra.run.dir={self.folder}"], layout, fault)

    @precondition(lambda self: len([*self.folder.glob("checkpoints/step_*.ckpt")]) > 1)
    @rule(choice=st.integers(0, STEPS), layout=st.sampled_from(LAYOUTS), fault=st.sampled_from(FAULTS))
    def go_back(self, choice: int, layout: str, fault: str) -> None:
        """Start again from an older checkpoint: what was the best may be of steps that no longer count."""
        remaining = sorted(self.folder.glob("checkpoints/step_*.ckpt"))
        self._start([f"resume={remaining[choice % len(remaining)]}"], layout, fault)

    @precondition(lambda self: self.last.exists())
    @rule()
    def lose_last(self) -> None:
        self.shell(f"rm {self.last}")

    @precondition(lambda self: (step_in(self.last) or 0) > 0)
    @rule(bytes_left=st.sampled_from([0, 1000, 20000]))
    def cut_last(self, bytes_left: int) -> None:
        """Cut the file off, and with it best.ckpt if this is a link to it."""
        self.shell(f"truncate -s {bytes_left} {self.last}")

    @precondition(lambda self: self.best.exists())
    @rule()
    def lose_best(self) -> None:
        self.shell(f"rm {self.best}")

    def teardown(self) -> None:
        if self.failed or not self.commands:
            return
        self._start([*JOB, f"hydra.run.dir={self.folder}"], LAYOUTS[len(self.commands) % len(LAYOUTS)], "")
        if not self._completed:  # the last checkpoint is damaged, and so is the best
            self.shell(f"rm {self.last}")
            self._start([*JOB, f"hydra.run.dir={self.folder}"], LAYOUTS[0], "")

    def _start(self, how: list[str], layout: str, fault: str) -> None:
        wanted = self.last if how[0] == f"resume={self.folder}" else Path(how[0].removeprefix("resume="))
        named = how[0].startswith("resume=")
        step, best_step = step_in(wanted if named else self.last), step_in(self.best)
        refused = step in (None, -1) if named else step == -1 and best_step in (None, -1)
        before = {path: path.read_bytes() for path in self.folder.glob("checkpoints/*")}
        what = fault.partition("@")[0]
        elastic = what == "worker" and layout.startswith("strategy=ddp")
        restarts = f"max_restarts={int(what == 'worker')}"
        run = self.program(*how, *layout.split(), f"elastic={str(elastic).lower()}", restarts, fault=fault)
        self._completed = run.returncode == 0
        self.seen["completed"] += self._completed
        self.seen[f"{what or 'undisturbed'}: exit {run.returncode}"] += 1
        if refused:
            *warnings, line = run.stderr.splitlines()
            one_line = line.startswith("error: ") and len(warnings) <= 1  # last.ckpt is damaged, and best.ckpt too
            self.check(run.returncode == 2 and one_line, "not refused in one line", run)
            after = {path: path.read_bytes() for path in self.folder.glob("checkpoints/*")}
            self.check(before == after, "a refused start has changed files", run)
            return
        self.check(run.returncode in CODES[what], f"exit {run.returncode}", run)
        if what != "kill":
            self.check(not [*self.folder.rglob(".*.tmp")], "a temporary file is left", run)
        if self._completed:
            self._check_outcome(run)
        else:
            now = step_in(self.last)
            self.check(now != -1 or step == -1, "last.ckpt is damaged", run)
            self.check((now or 0) >= (step or 0), f"last.ckpt is of step {now}, and was of step {step}", run)

    def _check_outcome(self, run: Run) -> None:
        actual, right = outcome(self.folder), undisturbed(self.home / "undisturbed")
        differing = [
            f"{key} {actual.get(key)} instead of {right[key]}" for key in right if actual.get(key) != right[key]
        ]
        self.typed(f"grep weights_sha256 {self.folder}/summary.json  # undisturbed: {right['weights_sha256']}")
        self.check(not differing, f"{', '.join(differing)}", run)


def test_a_disturbed_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    seen = tried(RunFolder, tmp_path, budget(3, 100, steps=4))
    assert seen["kill: exit -9"] > 0, seen
    assert seen["completed"] >= seen["histories"], seen


@pytest.mark.nightly
@pytest.mark.parametrize("planted", ["skip@resumed", "forget@resumed"])
def test_a_resume_that_goes_on_wrongly_is_detected(tmp_path: Path, planted: str) -> None:
    """The controls: a step that is taken back, and an optimizer that begins anew."""
    output = failure(RunFolder, tmp_path, planted)
    assert "weights_sha256" in output


@pytest.mark.nightly
def test_a_failing_history_can_be_typed(tmp_path: Path) -> None:
    """The commands that are shown lead to the wrong bits; without the planted fault, to the right ones."""

    class Short(RunFolder):
        begin = resume = start_again = go_back = lose_last = cut_last = lose_best = None  # type: ignore[assignment]

        @precondition(lambda self: not self.commands)
        @rule()
        def killed(self) -> None:
            self._start([*JOB, f"hydra.run.dir={self.folder}"], LAYOUTS[0], "kill@saved:2")

    output = failure(Short, tmp_path, "skip@resumed")
    commands = output.partition("history:\n")[2].partition("\n\n")[0]
    *_, last = commands.splitlines()
    right = last.rpartition(": ")[2]
    for wrong, text in ((True, commands), (False, commands.replace("FAULT=skip@resumed", ""))):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path}
        done = subprocess.run(
            ["bash", "-c", text], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert f'"{right}"' in done.stdout or wrong, (commands, done)
        assert f'"{right}"' not in done.stdout or not wrong, (commands, done)
