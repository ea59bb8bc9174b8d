"""lockstep search: a search that was killed goes on, and its last line is a command to use."""

import shlex
import signal
from pathlib import Path
from typing import Any

import optuna
import pytest
from conftest import Process, Program, Run, summary_of, wait_for
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from lockstep.errors import UserError
from lockstep.job.run_folder import lock_folder
from lockstep.programs.search import distribution

TINY = ("data=synthetic", "data.samples=200", "data.image_size=12", "data.num_classes=3", "threads=1", "logger=none")
SPACE = ("lr=tag(log,interval(0.001,0.1))", "batch_size=32,33")


def search(folder: Path) -> Program:
    return Program(folder / "outputs", "lockstep search")


def trials(folder: Path) -> dict[int, tuple[dict[str, Any], float | None]]:
    """Return what was drawn and found, by trial."""
    study = optuna.load_study(study_name="search", storage=f"sqlite:///{folder / 'study.db'}")
    assert all(trial.state.is_finished() for trial in study.trials)
    return {trial.number: (trial.params, trial.value) for trial in study.trials}


def in_trial(process: Process, folder: Path, number: int) -> None:
    """Wait until a trial has saved a checkpoint."""
    wait_for((folder / str(number) / "checkpoints" / "last.ckpt").exists, process)


@pytest.fixture(scope="module")
def searched(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("search") / "s"
    return search(folder.parent)(*TINY, *SPACE, f"folder={folder}", "trials=2", "max_epochs=6")


@pytest.fixture
def undisturbed(searched: Run) -> Path:
    return next(searched.outputs.parent.glob("s"))


def test_the_best_is_a_command(searched: Run, undisturbed: Path, run_train: Program) -> None:
    actual = trials(undisturbed)
    assert len({params["lr"] for params, _ in actual.values()}) == 2
    number = max(actual, key=lambda each: actual[each][1] or 0)
    best = summary_of(undisturbed / str(number))
    assert best["metrics"]["val/acc"] == actual[number][1]
    start, command = searched.stdout.splitlines()[-1].split(": ")
    assert (start, command[:20]) == ("to run the best again", "python src/train.py ")
    overrides = [*shlex.split(command)[2:], f"outputs={run_train.outputs}"]
    run_train(*overrides, "name=a")
    run_train(*overrides, "name=b", "lr=0.02")
    weights = [summary_of(next(run_train.outputs.glob(f"{name}/*")))["weights_sha256"] for name in "ab"]
    assert weights[0] == best["weights_sha256"] != weights[1]


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
def test_a_search_that_was_cut_short_makes_the_same_trials(undisturbed: Path, tmp_path: Path) -> None:
    folder, program = tmp_path / "s", search(tmp_path)
    overrides = (*TINY, *SPACE, f"folder={folder}", "trials=2", "max_epochs=6")
    for number, signum, code in ((0, signal.SIGTERM, 143), (1, signal.SIGKILL, -signal.SIGKILL)):
        process = program.start(*overrides)
        in_trial(process, folder, number)
        process.send_signal(signum)
        run = program.finish(process)
        assert run.returncode == code, str(run)
        assert ("to continue: run the same command with folder=" in run.stderr) == (code == 143)
    run = program(*overrides)
    assert trials(folder) == trials(undisturbed)
    assert "[2 of 2] job 1 completed" in run.stderr
    assert "job 0" not in run.stderr.split(" | best")[0], "what was made is not made again"
    weights = [[summary_of(each / number)["weights_sha256"] for number in "01"] for each in (folder, undisturbed)]
    assert weights[0] == weights[1]


@pytest.mark.usefixtures("processes")
def test_a_folder_has_one_search_at_a_time(tmp_path: Path) -> None:
    overrides = (*TINY, "lr=0.1,0.01", f"folder={tmp_path / 's'}", "trials=1", "max_epochs=1")
    with lock_folder(tmp_path / "s"):
        assert "works in this folder: wait until it ends" in refused(search(tmp_path)(*overrides, ok=False))


@pytest.mark.usefixtures("processes")
def test_a_search_follows_the_metric_of_the_model(tmp_path: Path) -> None:
    overrides = (*TINY, "lr=0.1,0.01", "max_epochs=1", "trials=2", f"folder={tmp_path / 's'}")
    search(tmp_path)(*overrides, "+model.monitor=val/loss")
    study = optuna.load_study(study_name="search", storage=f"sqlite:///{tmp_path / 's' / 'study.db'}")
    losses = [summary_of(tmp_path / "s" / str(number))["metrics"]["val/loss"] for number in range(2)]
    assert [trial.value for trial in study.trials] == losses
    assert study.best_value == min(losses)


def refused(run: Run) -> str:
    assert (run.returncode, "Traceback" in run.stderr) == (2, False), str(run)
    return run.stderr.splitlines()[-1]


@pytest.mark.usefixtures("processes")
def test_what_no_trial_can_mend_ends_the_search(tmp_path: Path) -> None:
    output = refused(search(tmp_path)("lr=interval(0.01,0.1)", "pieces=2", "batch_size=31", "trials=50", ok=False))
    assert output.startswith("error: the first 3 trials were refused: batch_size=31")
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.usefixtures("processes")
def test_a_trial_that_is_refused_is_not_the_end(tmp_path: Path) -> None:
    overrides = ("batch_size=33,32", "pieces=2", "max_epochs=1", f"folder={tmp_path / 's'}", "trials=4")
    run = search(tmp_path)(*TINY, *overrides)
    actual = trials(tmp_path / "s")
    assert {(params["batch_size"], value is None) for params, value in actual.values()} == {(33, True), (32, False)}
    assert "failed: batch_size=33" in run.stderr


@pytest.mark.usefixtures("processes")
def test_nothing_to_search_is_refused(tmp_path: Path) -> None:
    assert "nothing to search" in refused(search(tmp_path)("lr=0.1", ok=False))
    for setting in ("data.fold=0,1", "data=digits,synthetic"):
        assert "none is the best" in refused(search(tmp_path)(setting, ok=False))
    other = search(tmp_path)("lr=0.1,0.2", "sweep.metric=val/loss", "sweep.mode=max", ok=False)
    assert "sweep.mode=max: smaller values of val/loss" in refused(other)
    assert "trials=many" in refused(search(tmp_path)("trials=many", "lr=0.1,0.2", ok=False))


@pytest.mark.parametrize(
    ("override", "drawn"),
    [
        ("lr=interval(0.001,0.3)", FloatDistribution(0.001, 0.3)),
        ("lr=tag(log,interval(0.001,0.3))", FloatDistribution(0.001, 0.3, log=True)),
        ("n=int(interval(4,32))", IntDistribution(4, 32)),
        ("b=32,64", CategoricalDistribution([32, 64])),
        ("o=choice(sgd,adamw)", CategoricalDistribution(["sgd", "adamw"])),
        ("n=range(1,8,2)", IntDistribution(1, 7, step=2)),
        ("d=range(0.0,1.0,0.25)", FloatDistribution(0.0, 0.75, step=0.25)),
    ],
)
def test_hydras_words_for_a_space(override: str, drawn: Any) -> None:
    assert distribution(OverridesParser.create().parse_override(override)) == drawn


def test_a_space_that_can_not_be_drawn() -> None:
    with pytest.raises(UserError, match=r"lr=.*log"):
        distribution(OverridesParser.create().parse_override("lr=tag(log,interval(0,1))"))
