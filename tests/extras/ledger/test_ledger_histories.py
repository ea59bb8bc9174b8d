"""Whatever has happened to a run, its ledger is that of an undisturbed one, byte for byte; and a changed one is not
verified."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
from conftest import Program
from histories import SHORT, History, budget, failure, step_in, tried
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

JOB = (*SHORT, "max_epochs=2", "checkpoint_every=2", "checkpoint_keep=-1", "extras=[ledger]")
LAYOUTS = ("strategy=auto devices=1", "strategy=ddp devices=2", "strategy=dp devices=2")
FAULTS = ["kill@saved:2", "kill@step:5", "kill@saving:4", "term@step:3", "kill@saved:6", "disk@saving:4", ""]
VERIFY = "lockstep verify"
# Their programs are started without fixtures, and take a minute.
pytestmark = pytest.mark.usefixtures("run_train")


@cache
def undisturbed(home: Path) -> bytes:
    return (Program(home)(*JOB).folder / "ledger.jsonl").read_bytes()


class Ledger(History):
    """Starts of one run, on changing layouts; its ledger loses its end, or is changed, and is verified."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = self.folder / "ledger.jsonl"
        self.has_lost_a_line = False
        self.changed_line, self.changed_key = 0, "step"

    @initialize(
        fault=st.sampled_from(FAULTS),
        layout=st.sampled_from(LAYOUTS),
        line=st.integers(0, 9),
        key=st.sampled_from(["weights_sha256", "samples_sha256", "step", "before"]),
    )
    def begin(self, fault: str, layout: str, line: int, key: str) -> None:
        self.changed_line, self.changed_key = line, key
        self._start([*JOB, f"hydra.run.dir={self.folder}"], layout, fault)

    @precondition(lambda self: (step_in(self.folder / "checkpoints" / "last.ckpt") or 0) > 0)
    @rule(fault=st.sampled_from(FAULTS), layout=st.sampled_from(LAYOUTS))
    def resume(self, fault: str, layout: str) -> None:
        self._start([f"resume={self.folder}"], layout, fault)

    @precondition(lambda self: not self.has_lost_a_line and self._last_line_is_of_the_checkpoint())
    @rule(whole=st.booleans())
    def lose_the_last_line(self, whole: bool) -> None:
        """Do what a kill does before the line of the last checkpoint is written, or while it is."""
        self.has_lost_a_line = True
        self.shell(f"truncate -s -{len(self._lines()[-1]) if whole else 9} {self.ledger}")

    def teardown(self) -> None:
        if self.failed or not self.commands:
            return
        self._start([*JOB, f"hydra.run.dir={self.folder}"], LAYOUTS[len(self.commands) % len(LAYOUTS)], "")
        run = self.program(f"run={self.folder}", f"outputs={self.folder.parent}", "steps=1", script=VERIFY)
        self.check(run.returncode == 0 and "proven: steps" in run.stdout, "not verified", run)
        self._check_a_change()

    def _check_a_change(self) -> None:
        """Change a line in a copy of the folder: lockstep verify must see it."""
        lines = self._lines()
        number = 1 + self.changed_line % (len(lines) - 2)  # the last one of a chain can be replaced: nothing follows it
        line = json.loads(lines[number])
        line[self.changed_key] = line[self.changed_key] + 1 if self.changed_key == "step" else "0" * 64
        lines[number] = json.dumps(line, sort_keys=True).encode() + b"\n"
        copy = self.folder.with_name("changed")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder, copy)
        (copy / "ledger.jsonl").write_bytes(b"".join(lines))
        run = self.program(f"run={copy}", f"outputs={copy.parent}", script=VERIFY)
        self.seen["changed"] += 1
        self.check(
            run.returncode == 1,
            f"{self.changed_key} of line {number + 1} was changed, and lockstep verify exits otherwise",
            run,
        )

    def _last_line_is_of_the_checkpoint(self) -> bool:
        lines = self._lines()
        return bool(lines) and json.loads(lines[-1])["step"] == step_in(self.folder / "checkpoints" / "last.ckpt")

    def _lines(self) -> list[bytes]:
        return self.ledger.read_bytes().splitlines(keepends=True) if self.ledger.exists() else []

    def _start(self, how: list[str], layout: str, fault: str) -> None:
        run = self.program(*how, *layout.split(), fault=fault)
        self.has_lost_a_line = self.has_lost_a_line and run.returncode == -9
        self.seen[f"{fault.partition('@')[0] or 'undisturbed'}: exit {run.returncode}"] += 1
        self.check(run.returncode in (0, -9, 143, 1), f"exit {run.returncode}", run)
        if run.returncode == 0:
            self.seen["completed"] += 1
            same = self.ledger.read_bytes() == undisturbed(self.home / "undisturbed")
            self.typed(f"sha256sum {self.ledger}")
            self.check(same, "another ledger than that of an undisturbed run", run)


@pytest.mark.nightly
def test_a_disturbed_run_has_the_ledger_of_an_undisturbed_one(tmp_path: Path) -> None:
    seen = tried(Ledger, tmp_path, budget(2, 50, steps=2))
    assert seen["completed"] >= seen["histories"], seen
    assert seen["changed"], seen


@pytest.mark.parametrize("planted", ["skip@resumed", pytest.param("unlisted@resumed", marks=pytest.mark.nightly)])
def test_a_ledger_of_a_wrong_resume_is_detected(tmp_path: Path, planted: str) -> None:
    """The controls: a step that is taken back, and a checkpoint whose line is lost. One history shows each."""

    class Killed(Ledger):
        begin = resume = lose_the_last_line = None  # type: ignore[assignment]

        @precondition(lambda self: not self.commands)
        @rule()
        def killed(self) -> None:
            self._start([*JOB, f"hydra.run.dir={self.folder}"], LAYOUTS[0], "kill@saved:4")

    output = failure(Killed, tmp_path, planted)
    assert output.startswith("another ledger than that of an undisturbed run, after this history:")
    assert f"FAULT={planted} python tests/faults.py" in output
