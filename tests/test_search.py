"""A search makes the same trials whether it was killed or not, ends bad ones, and leaves a config to use."""

from __future__ import annotations

import csv
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import optuna
import pytest
from conftest import ROOT, Program, Run, summary_of, wait_for
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from lockstep.arithmetic.layout import Refusal
from lockstep.sweeps.search import check_fixed, distribution, search
from lockstep.sweeps.study import Study

TINY = ("data=synthetic", "data.samples=200", "data.image_size=12", "data.num_classes=3", "batch_size=32")
SPACE = ("lr=tag(log,interval(0.001,0.1))", "model.dropout=range(0.0,0.6,0.1)")
SEARCH = (*TINY, *SPACE, "sweep=optuna", "sweep.trials=5", "max_epochs=6", "threads=1", "callbacks.console=null")


def trials(run: Run) -> list[dict[str, str]]:
    """What trials.csv says, by job."""
    (path,) = run.outputs.rglob("trials.csv")
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["seconds"]
    return sorted(rows, key=lambda row: int(row["job"]))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Program(tmp_path_factory.mktemp("search") / "outputs")(*SEARCH)


def test_what_a_search_leaves(undisturbed: Run) -> None:
    found = trials(undisturbed)
    assert [row["status"] for row in found] == ["complete"] * 5
    assert len({row["lr"] for row in found}) == 5
    for job, row in zip(sorted(path for path in undisturbed.folders if path.name.isdigit()), found, strict=True):
        metrics = summary_of(job)["metrics"]
        assert (float(row["val/acc"]), float(row["test/acc"])) == (metrics["val/acc"], metrics["test/acc"])
    folder = next(undisturbed.outputs.rglob("trials.csv")).parent
    drawn = {path.stem for path in (folder / "plots").glob("*.png") if path.stat().st_size > 10_000}
    assert drawn >= {"history", "slices", "parallel", "validations"}
    assert "5 trials: 5 completed, 0 pruned, 0 failed" in undisturbed.stdout


def test_the_best_is_an_experiment(undisturbed: Run, run_train: Program) -> None:
    folder = next(undisturbed.outputs.rglob("trials.csv")).parent
    values = {int(row["job"]): float(row["val/acc"]) for row in trials(undisturbed)}
    best = summary_of(folder / str(max(values, key=lambda job: values[job])))
    again = run_train(f"--config-dir={folder}", "experiment=best").summary
    assert again["weights_sha256"] == best["weights_sha256"]
    (made,) = run_train.outputs.glob("*/*")
    assert f"resume: {made}/checkpoints/last.ckpt\n" in run_train(f"resume={made}", "--cfg", "job").stdout
    other = run_train(f"--config-dir={folder}", "experiment=best", "lr=0.02", "name=other")
    assert summary_of(next(other.outputs.glob("other/*")))["weights_sha256"] != best["weights_sha256"]


def test_a_killed_search_makes_the_same_trials(undisturbed: Run, run_train: Program) -> None:
    process = run_train.start(*SEARCH)
    (left,) = wait_for(lambda: list(run_train.outputs.rglob("2/train.log")), process)
    process.kill()
    process.communicate(timeout=30)
    begun = max(int(log.parent.name) for log in left.parents[1].glob("*/train.log"))  # 2, or one later by now
    run = run_train(f"sweep.resume={left.parents[1]}")
    assert trials(run) == trials(undisturbed)
    assert f"[{begun + 1} of 5] job {begun} completed" in run.stderr
    assert f"job {begun - 1} completed" not in run.stderr
    storage = f"sqlite:///{left.parents[1] / 'study.db'}"
    states = [trial.state.name for trial in optuna.load_study(study_name="mnist_cnn_synthetic", storage=storage).trials]
    assert sorted(states) == ["COMPLETE"] * 5 + ["FAIL"]


def test_a_failed_trial_is_not_the_end(run_train: Program) -> None:
    run = run_train(
        *TINY, "sweep=optuna", "sweep.trials=4", "batch_size=32,33", "pieces=2", "max_epochs=1", "logger=none", ok=False
    )
    found = trials(run)
    assert {(row["batch_size"], row["status"]) for row in found} == {("32", "complete"), ("33", "fail")}
    assert all(("can't be cut" in row["error"]) == (row["batch_size"] == "33") for row in found)
    assert run.returncode == 0, str(run)


@pytest.mark.parametrize(
    ("wrong", "said"), [("max_epochs=0", "max_epochs=0: must be"), ("sweep.jobs=9999", "sweep.jobs=9999: each job has")]
)
def test_what_no_trial_can_mend_is_refused_before_any(run_train: Program, wrong: str, said: str) -> None:
    run = run_train("sweep=optuna", "lr=interval(0.01,0.1)", wrong, ok=False)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1), str(run)
    assert run.stderr.startswith(f"error: {said}")
    assert not run.outputs.exists()


@pytest.mark.parametrize(("others", "status"), [(1.0, "pruned"), (0.0, "completed")])
def test_a_trial_that_is_behind_is_ended_on_all_ranks(run_train: Program, others: float, status: str) -> None:
    folder = run_train.outputs / "study"
    folder.mkdir(parents=True)
    study = optuna.create_study(
        study_name="mnist_cnn_synthetic", storage=f"sqlite:///{folder / 'study.db'}", direction="maximize"
    )
    for job in range(5):
        study.add_trial(
            optuna.trial.create_trial(
                value=others,
                params={"lr": 1e-5},
                distributions={"lr": FloatDistribution(1e-6, 1e-4)},
                intermediate_values=dict.fromkeys(range(1, 5), others),
                user_attrs={"job": job, "folder": str(folder / str(job))},
            )
        )
    run = run_train(
        *TINY, "sweep=optuna", "sweep.trials=6", "lr=interval(1e-6,1e-4)", "max_epochs=4", "logger=none",
        "strategy=ddp", "devices=2", f"hydra.sweep.dir={folder}",
    )  # fmt: skip
    summary = summary_of(folder / "5")
    assert summary["status"] == status, str(run)
    assert summary["epochs"] == (4 if status == "completed" else 1)  # the second epoch's end is not counted
    assert "Traceback" not in run.stderr
    assert ("test/acc" in summary["metrics"]) == (status == "completed")
    assert f"[6 of 6] job 5 {status}" in run.stderr


@pytest.mark.slow
def test_two_processes_share_a_study(run_train: Program) -> None:
    options = (*SEARCH, "sweep.trials=6", "max_epochs=40", f"hydra.sweep.dir={run_train.outputs}")
    processes = [run_train.start(*options) for _ in range(2)]
    runs = [run_train.finish(process) for process in processes]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(map(str, runs))
    ended = [re.findall(r"job (\d) (?:completed|pruned)", run.stderr) for run in runs]
    assert all(ended), "one of them made all trials"
    assert sorted(ended[0] + ended[1]) == list("012345")
    assert len(trials(runs[0])) == 6


# The parts


@pytest.mark.parametrize(
    ("override", "drawn"),
    [
        ("lr=interval(0.001,0.3)", FloatDistribution(0.001, 0.3)),
        ("lr=tag(log,interval(0.001,0.3))", FloatDistribution(0.001, 0.3, log=True)),
        ("n=int(interval(4,32))", IntDistribution(4, 32)),
        ("n=tag(int,log,interval(4,32))", IntDistribution(4, 32, log=True)),
        ("b=32,64", CategoricalDistribution([32, 64])),
        ("o=choice(sgd,adamw)", CategoricalDistribution(["sgd", "adamw"])),
        ("n=range(1,8,2)", IntDistribution(1, 7, step=2)),
        ("d=range(0.0,1.0,0.25)", FloatDistribution(0.0, 0.75, step=0.25)),
    ],
)
def test_hydras_words_for_a_space(override: str, drawn: Any) -> None:
    assert distribution(OverridesParser.create().parse_override(override)) == drawn


def test_a_space_that_can_not_be_drawn() -> None:
    with pytest.raises(Refusal, match=r"lr=.*log"):
        distribution(OverridesParser.create().parse_override("lr=tag(log,interval(0,1))"))


@pytest.mark.parametrize(
    ("fixed", "space", "wrong"),
    [
        ("max_epochs=0", {"lr": FloatDistribution(0, 0.1), "batch_size": CategoricalDistribution([33, 32])}, True),
        ("pieces=2", {"batch_size": CategoricalDistribution([33, 32])}, False),
        ("pieces=2", {"batch_size": IntDistribution(31, 33)}, False),
        ("pieces=2", {"batch_size": CategoricalDistribution([33])}, True),
        (
            "elastic=true",
            {"strategy": CategoricalDistribution(["auto", "dp"]), "devices": CategoricalDistribution([1, 2])},
            False,
        ),
        (
            "elastic=true",
            {"devices": CategoricalDistribution([1, 2]), "strategy": CategoricalDistribution(["dp"])},
            True,
        ),
        ("seed=1", {"model": CategoricalDistribution(["nope", "mnist_cnn"])}, False),
    ],
)
def test_what_a_trial_can_mend_is_left_to_it(fixed: str, space: dict[str, Any], wrong: bool) -> None:
    loader = ConfigLoaderImpl(create_config_search_path(str(ROOT / "conf")))
    config = loader.load_configuration("train", [fixed], RunMode.MULTIRUN)
    with pytest.raises(Refusal) if wrong else nullcontext():
        check_fixed(config, HydraContext(loader, None), [fixed], space)  # type: ignore[arg-type]


def test_a_trial_that_runs_is_not_taken_for_dead(tmp_path: Path) -> None:
    sweep = {"storage": None, "mode": "max", "trials": 3, "seed": 0, "metric": "val/acc"}
    space = {"lr": FloatDistribution(0, 1)}
    one, other = Study(tmp_path, "s", sweep, space), Study(tmp_path, "s", sweep, space)
    drawn = [one.draw(), other.draw()]
    assert [each.job for each in drawn if each] == [0, 1]
    assert drawn[0] is not None
    drawn[0].running.close()  # what the kernel does for a process that dies
    again = other.draw()
    assert again is not None
    assert (again.job, len(other.living())) == (0, 2)
    other.ended(again, {"status": "interrupted"})
    assert [trial.user_attrs["job"] for trial in other.living()] == [1]


def test_what_is_missing_is_said(run_train: Program, tmp_path: Path) -> None:
    (tmp_path / "optuna").mkdir()
    (tmp_path / "optuna" / "__init__.py").write_text("raise ImportError")
    fresh = Program(tmp_path / "outputs", fresh=True)
    run = fresh("sweep=optuna", "lr=interval(0.1,0.2)", env={"PYTHONPATH": str(tmp_path)}, ok=False)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1), str(run)
    assert run.stderr.startswith("error: a search needs Optuna: pip install optuna")
    run = run_train("sweep=optuna", "lr=0.1", ok=False)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1), str(run)
    assert "nothing to search" in run.stderr


@pytest.mark.parametrize("others", [{"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "theirs"}, {}])
def test_one_process_draws(monkeypatch: pytest.MonkeyPatch, others: dict[str, str]) -> None:
    for variable, value in others.items():
        monkeypatch.setenv(variable, value)
    config = OmegaConf.create({"num_nodes": 1 if others else 2})
    with pytest.raises(Refusal, match="would draw jobs of its own"):
        search(config, None, None, [])  # type: ignore[arg-type]
