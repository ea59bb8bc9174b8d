"""The judge of modules: it names each fault in the same words, whoever asks it."""

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import broken_code
import pytest
import torch
from broken_code import IMAGES, JUDGED, LABELS
from conftest import ROOT, Program, template
from torch.utils.data import TensorDataset
from trainer.small import lines_of_lockstep, trainer

import lockstep
from lockstep.errors import StepRefused
from lockstep.guards import check
from lockstep.testing.runs import Runs
from lockstep.testing.server import server

BATCH = torch.from_numpy(IMAGES).float() / 255, torch.from_numpy(LABELS)
DATA = ("~model", "data=synthetic", "data.samples=100", "data.image_size=12", "data.num_classes=3")
PARITY = ("batch_size=16", "accelerator=cpu", "devices=2", "accumulate_grad_batches=2", "steps=3", "test_samples=8")
Judge = Callable[[str], str]


def module(name: str) -> Any:
    torch.manual_seed(0)
    return getattr(broken_code, name)()


@pytest.fixture
def alone() -> Judge:
    """Return what the judge says about a module outside of a run."""
    return lambda name: "\n".join(each.text for each in check(module(name), [part[:16] for part in BATCH]))


@pytest.fixture
def run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Judge:
    """Return what a run says before its first step."""

    def texts_of(name: str) -> str:
        data = lockstep.DataModule(train=TensorDataset(*BATCH))
        with caplog.at_level(logging.WARNING, "lockstep"):
            try:
                trainer(tmp_path, batch_size=20, pieces=2, exact=True, max_steps=1).fit(module(name), data)
            except StepRefused as error:
                return str(error)
        return "\n".join(lines_of_lockstep(caplog))

    return texts_of


@pytest.fixture
def parity(tmp_path: Path) -> Judge:
    """Return what `lockstep parity` prints about rules."""

    def texts_of(name: str) -> str:
        home = template(tmp_path)
        for file in ("broken_code.py", "user_modules.py"):
            shutil.copy(ROOT / "tests" / file, home / "src")
        program = Program(tmp_path / "outputs", "lockstep parity", home=home)
        shown = program(*DATA, *overrides(name), *PARITY, ok=name == "Sound")
        begins = ("A rule that the module breaks: ", "error: training_step")  # what is always refused ends the program
        return "\n".join(each for each in (shown.stdout + shown.stderr).splitlines() if each.startswith(begins))

    return texts_of


@pytest.fixture
def module_tests(tmp_path: Path, request: pytest.FixtureRequest) -> Judge:
    """Return what `ModuleTests` fails with."""

    def texts_of(name: str) -> str:
        runs = Runs([*DATA, *overrides(name)], tmp_path, server(request.session))
        return "\n".join(each.text for each in runs.findings())

    return texts_of


def overrides(name: str) -> list[str]:
    return [f"+model._target_=broken_code.{name}", "+model.name=broken"]


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize("entry", ["alone", "run"])
def test_a_fault_is_named_outside_of_a_run_and_in_one(name: str, entry: str, request: pytest.FixtureRequest) -> None:
    if (name, entry) == ("ByRank", "alone"):
        pytest.skip("there are no ranks outside of a run")
    must_name(name, request.getfixturevalue(entry)(name))


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize("entry", ["module_tests", "parity"])
def test_programs_name_it_in_the_same_words(name: str, entry: str, request: pytest.FixtureRequest) -> None:
    must_name(name, request.getfixturevalue(entry)(name))


def must_name(name: str, actual: str) -> None:
    assert re.search(f"(?s){JUDGED[name]}", actual) if JUDGED[name] else not actual
    assert actual.count("module-rules") == bool(JUDGED[name]), "nothing else is found"
