"""What is for GPUs, as far as a machine without one can show it: the benchmark, and a day's trials."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_day
import gpu_probe
import gpu_wheels
import pytest
import torch
from bench import steps
from bench.players import OPPONENTS
from gpu_day import Day, Trial

from lockstep.commands.api import compose
from lockstep.config import check as config
from lockstep.config.check import check
from lockstep.errors import UserError
from lockstep.launch import machine

TINY = replace(
    steps.GPU_CASES[0], batch=16, data=steps.SMALL | {"samples": 600}, steps=4, rounds=1, limits=(1e-3, 0.5), save_at=2
)


def test_every_side_is_one_that_train_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    monkeypatch.setattr("lockstep.config.check.compiler_lacking", lambda accelerator: None)  # a compiler, say
    for case in steps.GPU_CASES:
        for options in steps.OURS.values():
            request = check(compose(f"model={case.model}", f"batch_size={case.batch}", *steps.GPU_TRAINING, *options))
            assert request.layout.accelerator == "gpu"
        assert int(0.9 * case.data["samples"]) % case.batch == 0  # else the tail would be compiled too
        assert 0.9 * case.data["samples"] / case.batch > (case.rounds + 1) * case.steps  # an epoch's end saves


@pytest.mark.usefixtures("forked_commands")
def test_a_case_runs_whole_on_a_cpu(tmp_path: Path) -> None:
    """All sides make the same steps, else it fails: as it does with one that takes another order."""
    pairs = steps.GPU_PAIRS[1:3]  # bf16 may be emulated
    lines = steps.against(TINY, tmp_path, pairs, ("accelerator=cpu", *steps.GPU_TRAINING[1:]))
    assert [line.what.partition(": ")[2] for line in lines] == [
        "against the plain loop",
        "against the loop with every lever",
    ]
    assert all(line.ours > 0 and line.other > 0 for line in lines)

    task, wrong = tmp_path / "small_cnn.task.pt", tmp_path / "wrong.pt"
    report: dict[str, Any] = torch.load(task)
    torch.save(report | {"order": report["order"][::-1]}, wrong)
    sides = {
        side: [[str(OPPONENTS / "bare_loop.py"), "--task", str(path)]]
        for side, path in (("plain", task), ("wrong", wrong))
    }
    with pytest.raises(RuntimeError, match=r"the weights of 'wrong' are \d\d"):
        steps.race(replace(TINY, rounds=0), sides, tmp_path, {"wrong": ("plain", TINY.limits[0])}, task)


# --- a day's trials ---------------------------------------------------------------------------------------------------


def test_every_trial_is_one_that_train_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for layouts and precisions that don't go together, as expected."""
    monkeypatch.setattr(machine, "gpu_count", lambda: 2)
    monkeypatch.setattr(config, "compiler_lacking", lambda accelerator: None)
    refused = []
    for trial in gpu_day.trials(Day("gpu", 2)):
        for command in (command for programs in trial.commands for command in programs if "src/train.py" in command):
            try:
                check(
                    compose(*(each for each in command[command.index("src/train.py") + 1 :] if "resume=" not in each))
                )
            except UserError as refusal:
                refused.append((trial.name, "don't go together" in str(refusal)))
    assert refused == [(name, True) for name in gpu_day.REFUSED]


def test_a_day_reports_all_whatever_its_trials_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(name: str, program: str, **more: Any) -> Trial:
        return Trial(more.pop("part", "bits"), name, [[("-c", program)]], **more)

    def left(digest: str) -> str:
        return f"open('OUTPUTS/summary.json', 'w').write('{{\"weights_sha256\": \"{digest}\"}}')"

    wrong = [
        trial("a run that differs", left("b"), task="one"),
        trial("a control that is not seen", left("a"), task="one", differs=True),
        trial("nothing to compare", "pass", task="one", differs=True),
        trial("a failure", "exit('error: out of luck')"),
        trial("tests that are skipped", "print('6 skipped')", last_line=" passed"),
        trial(
            "a hanging one", f"import os, time; print(os.getpid(), file=open('{tmp_path}/pid', 'w')); time.sleep(99)"
        ),
    ]
    right = [
        trial("the first", left("a"), task="one"),
        trial("the same", left("a"), task="one"),
        trial("a control", left("b"), task="one", differs=True),
        trial("refused", "import sys; print('error: no'); sys.exit(2)", part="layouts", expected="completes"),
    ]
    wrong[-1] = replace(wrong[-1], seconds=2)
    monkeypatch.setattr(gpu_day, "trials", lambda *_: [*right, *wrong])
    options = ["--accelerator=cpu"]
    call = ["gpu_day.py", "bits", "layouts", *options]
    monkeypatch.setattr(sys, "argv", [*call, f"--to={tmp_path}"])
    assert gpu_day.main() == 1
    actual = {row["trial"]: row for row in json.loads((tmp_path / "gpu_day.json").read_text())["rows"]}
    assert {name for name, row in actual.items() if row["good"]} == {each.name for each in right}
    assert {name for name, row in actual.items() if not row["good"]} == {each.name for each in wrong}
    assert actual["a hanging one"]["verdict"] == "HANGS: killed after 10 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    page = (tmp_path / "gpu_day.md").read_text()
    assert all(f"{each.part}: {each.name} " in page for each in [*right, *wrong])
    assert "error: out of luck" in (tmp_path / "gpu_day.log").read_text()

    # A first trial that fails leaves nothing to compare with: its control says nothing then.
    alone = replace(right[2], name="a control without a first")
    assert not gpu_day.carried_out(alone, 60, {}, Day("cpu", 2), tmp_path)["good"]

    # A later call keeps what was as promised, its bits too, and runs the rest again.
    later = [
        replace(right[0], commands=[[("-c", "exit('not to be run again')")]]),
        trial("a run that differs", left("a"), task="one"),
        trial("not yet begun", "pass"),
    ]
    monkeypatch.setattr(gpu_day, "trials", lambda *_: later)
    request = ["gpu_day.py", "bits", *options, f"--from={tmp_path}", f"--to={tmp_path / 'next'}"]
    for minutes, verdicts in {0: ["left out: the time is up"] * 2, 1: ["the same bits", "no output"]}.items():
        monkeypatch.setattr(sys, "argv", [*request, f"--minutes={minutes}"])
        assert gpu_day.main() == 1  # others of the first call are still wrong
        rows = json.loads((tmp_path / "next" / "gpu_day.json").read_text())["rows"]
        assert rows[0] == actual["the first"]
        assert [(row["trial"], row["verdict"]) for row in rows[-2:]] == list(
            zip(("a run that differs", "not yet begun"), verdicts, strict=True)
        )


def test_both_calls_are_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their short form, with programs in processes of their own. The first call is killed and leaves its results."""
    first, to = tmp_path / "first", tmp_path / "to"
    common = [sys.executable, gpu_day.__file__, "--accelerator=cpu", "--short", "--jobs=2"]
    cut = subprocess.Popen([*common, "one", f"--to={first}"], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert cut.stdout is not None
    for line in cut.stdout:
        if line.startswith("bits: accumulate"):
            break
    os.killpg(cut.pid, signal.SIGKILL)
    cut.wait()
    for process in Path("/proc").glob("[0-9]*/cmdline"):  # the trials have sessions of their own
        with suppress(OSError):
            if str(first) in (command := process.read_bytes().decode(errors="replace")) and "gpu" in command:
                os.kill(int(process.parent.name), signal.SIGKILL)
    begun = gpu_day.read(first)["rows"]
    assert [row["part"] for row in begun if row["good"]][:4] == ["first", "first", "bits", "bits"]

    request = ["two", "--minutes=30", f"--from={first}", f"--to={to}"]
    ended = subprocess.run([*common, *request], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(path.name for path in to.iterdir()) == ["gpu_day.json", "gpu_day.log", "gpu_day.md", "probe.json"]
    assert sum(path.stat().st_size for path in to.iterdir()) < 2**20  # 16 MiB a file may come back
    actual = gpu_day.read(to)
    assert actual["rows"][: len(begun)] == begun
    assert actual["rows"][len(begun)]["part"] == "tests"
    assert {row["part"] for row in actual["rows"]} == {"tests", *gpu_day.FIRST_CALL}
    of_bits = {row["trial"]: row["verdict"] for row in actual["rows"] if row["part"] == "bits"}
    assert {name for name, verdict in of_bits.items() if verdict == "other bits"} == {
        "control: two ranks without exact"
    }
    assert {row["side"] for row in actual["steps"]} == {*gpu_probe.STEPS, *gpu_probe.PRICE}
    assert not [row for row in actual["steps"] if "error" in row]

    # The page is for GPUs, so it refuses the rehearsal.
    assert gpu_day.write_page(to) == 2
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{gpu_day.BEGIN}\nnothing yet\n{gpu_day.END}\nafter\n")
    (to / "probe.json").write_text(json.dumps([row | {"device": "NVIDIA X"} for row in actual["steps"]]))
    monkeypatch.setattr(gpu_day, "PAGE", page)
    monkeypatch.setattr(gpu_day, "ROOT", tmp_path)
    assert gpu_day.write_page(to) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{gpu_day.END}\nafter\n")
    assert "## Measured on NVIDIA X" in text
    assert "of ours, 8 pieces" in text
    assert "| `python src/train.py model=small_cnn" in text
    assert "nothing yet" not in text


def test_predictions_are_for_cases_of_the_probe() -> None:
    measured = {case.key for part in ("all", "exact", "steps", "price") for case in gpu_probe.cases(part, short=False)}
    assert set(gpu_probe.PREDICTIONS) <= measured


def test_a_side_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_probe, "loop", lambda *_: 1 / 0)
    case = gpu_probe.Case("small_cnn", 8, "bf16", "plain loop")
    row = gpu_probe.measured(case, torch.device("cpu"), gpu_probe.Clock(torch.device("cpu"), 1, 1, 1))
    assert row["error"] == "ZeroDivisionError: division by zero"


def test_wheels_are_collected_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(stdout="abc\n")

    monkeypatch.setattr(gpu_wheels.subprocess, "run", run)
    gpu_wheels.collect(tmp_path)
    assert [command[5 if "pip" in command else 1] for command in ran] == ["download", "wheel", "rev-parse"]
    assert gpu_wheels.commit(tmp_path) == "abc"
    assert gpu_wheels.install(tmp_path) is False
