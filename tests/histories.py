"""State machines of folders on which programs work: histories of faults that end as if nothing had happened."""

import json
import shlex
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import ROOT, Program, Run
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

SHORT = (
    *("data=synthetic", "data.samples=40", "data.image_size=12", "data.num_classes=3", "data.val_fraction=0.25"),
    *(
        "data.augment={crop:1,flip:true,fill:zero}",
        "model.dropout=0.25",
        "optimizer=adamw",
        "lr=0.01",
        "accelerator=cpu",
    ),
    *("batch_size=12", "pieces=6", "exact=true", "threads=1", "logger=none", "callbacks.console=null"),
)


def budget(examples: int, nightly: int, steps: int = 5) -> settings:
    """Return how many histories are tried, of at most so many steps. Those of each day are always the same."""
    is_nightly = settings.get_current_profile_name() == "nightly"
    return settings(
        max_examples=nightly if is_nightly else examples,
        stateful_step_count=2 * steps if is_nightly else steps,
        derandomize=not is_nightly,
        phases=[Phase.generate, *([Phase.shrink] if is_nightly else [])],  # each try takes seconds
        suppress_health_check=list(HealthCheck),
        database=None,
        deadline=None,
    )


class History(RuleBasedStateMachine):
    """A history of commands on one folder. A failure shows them as they can be typed.

    Attributes:
        home: the folder of all histories, each of which has one in it.
        planted: what a start that shall not be disturbed has as FAULT all the same: a control.
        seen: how often a thing happened over all histories of a machine.
    """

    home: ClassVar[Path]
    planted: ClassVar[str] = ""
    seen: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.seen["histories"] += 1
        self.folder = self.home / str(self.seen["histories"]) / "run"
        self.commands: list[str] = []
        self.failed = False

    def typed(self, command: str) -> None:
        self.commands.append(command.replace(str(self.folder), "$FOLDER").replace(f"{ROOT}/", ""))

    def shell(self, command: str) -> None:
        """Run a command of the shell."""
        self.typed(command)
        subprocess.run(command, shell=True, check=True)

    def program(self, *arguments: str, fault: str = "", script: str = "src/train.py") -> Run:
        """Run a program to its end; train.py with a fault, if one is given."""
        if script == "src/train.py" and any(self.folder.rglob("*.ckpt")):
            fault = fault or self.planted
        script = "tests/faults.py" if fault else script
        run = Program(self.folder.parent, script)(*arguments, env={"FAULT": fault} if fault else {}, ok=False)
        command = shlex.join(["python", script, *arguments])
        self.typed(f"{f'FAULT={fault} ' if fault else ''}{command}  # exit {run.returncode}")
        self.check("Traceback" not in run.stdout + run.stderr, "a traceback", run)
        return run

    def check(self, is_right: bool, wrong: str, run: Run | None = None) -> None:
        """Fail with the history if something is wrong."""
        if is_right:
            return
        self.failed = True
        lines = [f"{wrong}, after this history:", "FOLDER=$(mktemp -d)/run", *self.commands]
        raise AssertionError("\n".join([*lines, "", *([str(run)] if run else [])]))


def tried(machine: type[History], home: Path, how: settings, planted: str = "") -> Counter[str]:
    """Try a machine's histories in a folder, and return what was seen."""
    here: Any = type(machine.__name__, (machine,), {"home": home, "seen": Counter(), "planted": planted})
    run_state_machine_as_test(here, settings=how)
    seen: Counter[str] = here.seen
    return seen


def failure(machine: type[History], home: Path, planted: str) -> str:
    """Return what a machine says about the first history that fails by a planted fault."""
    with pytest.raises(BaseException) as raised:  # noqa: PT011 - Hypothesis may wrap it in a group
        tried(machine, home, settings(budget(30, 30), max_examples=30), planted)
    error: BaseException = raised.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, AssertionError), error
    return str(error)


def step_in(path: Path) -> int | None:
    """Return the step of a checkpoint, as plain torch and zipfile read it; -1 if it is damaged; None without one."""
    import zipfile

    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                return -1
        return int(torch.load(path, weights_only=True)["global_step"])
    except Exception:
        return -1


PARTS = ("status", "weights_sha256", "steps", "samples_seen", "tested_step")  # of a summary


def outcome(folder: Path, parts: Sequence[str] = (*PARTS, "metrics", "best")) -> dict[str, Any]:
    """Return what a run must end with, however it was disturbed."""
    summary = json.loads((folder / "summary.json").read_text())
    actual = {key: summary[key] for key in parts if key in PARTS}
    if "metrics" in parts and summary["metrics"]:
        actual |= {key: round(value, 5) for key, value in summary["metrics"].items()}
    if "best" in parts and (best := folder / "checkpoints" / "best.ckpt").exists():
        content = torch.load(best, weights_only=True)
        weights = sum(float(each.double().abs().sum()) for each in content["state_dict"].values())
        actual |= {"best": content["global_step"], "weights of the best": weights}
    return actual
