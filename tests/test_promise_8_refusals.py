"""Promise 8: bad input is refused early, in one line that names what is wrong and what would be right.

The cases are in refusals.yaml, which the site prints (docs/reference/refusals.md).
"""

import re
from pathlib import Path

import pytest
from conftest import ROOT, TRAINER_BY_DAY, Program, Run, page_file
from refusals import Refusal, checked, read_table, refused_command, set_machine
from user_runs import train

pytestmark = pytest.mark.usefixtures("two_cores_no_gpu")
REFUSALS = read_table()


def rows(how: str) -> pytest.MarkDecorator:
    """Return the rows of the table that are run in one way, as parameters of a test."""
    chosen = [row for row in REFUSALS if row.how == how]
    return pytest.mark.parametrize("row", chosen, ids=[f"{row.program} {row.command}" for row in chosen])


@rows("check")
def test_refused_in_one_line(row: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, row.gpus)
    line = refused_command(row.program, row.overrides(tmp_path))
    assert row.is_message(line, tmp_path), line


@pytest.mark.parametrize("group", ["model", "data", "optimizer", "experiment", "logger", "debug"])
def test_a_name_that_does_not_exist_is_refused_with_all_that_do(group: str) -> None:
    files = [*ROOT.glob(f"conf/{group}/*.yaml"), *ROOT.glob(f"src/lockstep*/conf/{group}/*.yaml")]
    names = sorted({file.stem for file in files if file.stem[0] != "_"})
    assert f"known: {', '.join(names)}" in refused_command("train", [f"{group}=nowhere"])


@pytest.mark.parametrize(
    "overrides",
    [
        "devices=4",
        "devices=8 batch_size=64",
        "pieces=8 devices=3",
        "pieces=6 devices=3 accumulate_grad_batches=2 batch_size=96",
        "strategy=dp devices=3 batch_size=66",
        "elastic=true devices=2",
        "precision=64-true",
        "experiment=mnist_cnn",
        "+debug.trainer.limit_val_batches=0 +debug.trainer.benchmark=true",
        "model=resnet18 logger=csv experiment=[mnist_cnn]",
    ],
)
def test_what_fits_is_taken(overrides: str) -> None:
    """The control: a check that refused everything would pass all tests above."""
    assert checked(*overrides.split()).layout.batch_size > 0


def test_what_fits_two_gpus_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of rows with GPUs."""
    set_machine(monkeypatch, 2)
    assert checked("devices=2").layout.accelerator == "gpu"
    assert checked("devices=3", "batch_size=96", "accelerator=cpu").layout.accelerator == "cpu"
    assert checked("devices=2", "strategy.sync_batchnorm=true").strategy.__dict__["sync_batchnorm"]


def test_another_message_is_no_match(tmp_path: Path) -> None:
    """The control of the comparison: a part of a line, or a line with more, is not the row's message."""
    row = Refusal("lr=-1", "lr=-1: must be {folder}… or so")
    assert row.is_message(f"lr=-1: must be {tmp_path} or so", tmp_path)
    assert row.is_message(f"lr=-1: must be {tmp_path}, 3 or so", tmp_path)
    for line in ("lr=-1: must be", "lr=-1: must be elsewhere or so", f"error: lr=-1: must be {tmp_path} or so"):
        assert not row.is_message(line, tmp_path)


def test_the_page_shows_every_row() -> None:
    shown = (ROOT / "docs" / "reference" / "refusals.md").read_text()
    assert len(REFUSALS) > 100
    assert shown.count("\n| ") == len(REFUSALS) + shown.count("| command | message |")
    for row in REFUSALS:
        assert row.message.replace("{folder}", "<folder>") in shown


# --- Through real processes: exit code, one line, no traceback, no folder ---------------------------------------------


@pytest.mark.usefixtures("processes")
@rows("before_torch")
def test_a_typing_mistake_is_refused_before_torch_is_imported(row: Refusal, tmp_path: Path) -> None:
    must_be_refused(without_torch(tmp_path, row.overrides(tmp_path)), row, tmp_path)


@pytest.mark.usefixtures("processes")
@rows("run")
def test_a_refused_run_ends_with_2_and_leaves_nothing(row: Refusal, tmp_path: Path) -> None:
    program = Program(tmp_path / "outputs", f"src/{row.program}.py")
    must_be_refused(program(*row.overrides(tmp_path), ok=False), row, tmp_path)


@pytest.mark.usefixtures("processes")
@rows("started")
def test_what_a_first_validation_shows_is_refused_and_leaves_nothing(row: Refusal, tmp_path: Path) -> None:
    run = Program(tmp_path / "outputs")(*row.overrides(tmp_path), ok=False)
    assert run.returncode == 2, str(run)
    assert row.is_message(run.stderr.splitlines()[-1].removeprefix("error: "), tmp_path), run.stderr
    assert run.folders == []


@pytest.mark.usefixtures("processes")
def test_a_run_needs_torch(tmp_path: Path) -> None:
    """The control."""
    assert "torch is not here" in without_torch(tmp_path, ["data=synthetic", "data.samples=20"]).stderr


def without_torch(folder: Path, overrides: list[str]) -> Run:
    """Return a run in an interpreter that cannot import torch."""
    (folder / "torch.py").write_text("raise ImportError('torch is not here')")
    train = Program(folder / "outputs", fresh=True)
    return train(*overrides, env={"PYTHONPATH": str(folder)}, ok=False)


def must_be_refused(run: Run, row: Refusal, folder: Path) -> None:
    """Check that a run was refused as the row says, and left nothing."""
    assert run.returncode == 2, str(run)
    assert run.stdout == ""
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1, run.stderr
    assert row.is_message(run.stderr.removeprefix("error: ").removesuffix("\n"), folder), run.stderr
    assert run.folders == []


def test_what_only_the_first_step_can_refuse_leaves_nothing_either(project: Path, tmp_path: Path) -> None:
    task = ("data=synthetic", "strategy=ddp", "devices=2", "batch_size=8", "model._target_=mine.Hungry")
    run = Program(tmp_path, home=project)(*task, ok=False)
    assert run.returncode == 2, str(run)
    assert re.search("error: step 1: out of memory in 2 pieces of 4 samples.*\n$", run.stderr), run.stderr
    assert run.folders == []


BOTH_REFUSE = {
    "pieces=5": "batch_size=24 can't be cut into 5 equal pieces",
    "batch_size=96": "batch_size=96 is more than the 81 samples",
    "devices=8 strategy=dp": "pieces=6 is fewer than 8 devices",
    "devices=8 strategy=ddp": "pieces=6 is fewer than 8 devices",
    "model._target_=mine.LossOfSum": "it must be the mean over the samples",
}


@TRAINER_BY_DAY
@pytest.mark.parametrize("overrides", BOTH_REFUSE)
def test_a_program_with_the_trainer_refuses_as_the_template_does(either: Path, tmp_path: Path, overrides: str) -> None:
    """Each of its rules: tests/trainer/test_trainer.py. That both have the same: tests/trainer/test_one_trainer.py."""
    run = train(either, tmp_path, "LitDigits", *overrides.split(), ok=False)
    assert run.returncode == 2, str(run)
    line = run.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert BOTH_REFUSE[overrides] in line
    assert "Traceback" not in run.stderr
    assert run.folders == []
    assert not list(tmp_path.rglob("*.ckpt"))


def test_flags_of_hydra_are_taken(run_train: Program) -> None:
    """The control."""
    assert "batch_size: 32" in run_train("batch_size=32", "--cfg", "job", "--resolve").stdout


def test_help_shows_the_keys_of_what_is_chosen(run_train: Program) -> None:
    page = run_train("model=resnet18,mnist_cnn", "optimizer=adamw", "lr=0.1", "--help").stdout
    for name in ("model/resnet18", "model/mnist_cnn", "optimizer/adamw"):
        of_editors, _, text = page_file(name).read_text().partition("\n")
        assert "schema" in of_editors
        assert text in page
    assert "scheduler" not in page
    assert "batch_size: 64 #" in run_train("lr=0.1", "--help").stdout, "nothing is chosen: the front page"
    run = run_train("model=resnet8", "--help", ok=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert re.fullmatch("error: model=resnet8: did you mean resnet18.*\n", run.stderr)


def test_a_traceback_for_those_who_ask(run_train: Program) -> None:
    run = run_train("lr=-1", env={"HYDRA_FULL_ERROR": "1"}, ok=False)
    assert run.returncode == 2
    assert "Traceback" in run.stderr
    assert run.stderr.endswith("error: lr=-1: must be greater than 0\n")
