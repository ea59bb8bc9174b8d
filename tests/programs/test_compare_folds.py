"""lockstep compare: cross-validations, and whether a difference is larger than the noise."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from compared_runs import LAYOUT, compare, written
from conftest import Program

from lockstep.programs.comparison.noise import compare as difference
from lockstep.programs.comparison.noise import further_seeds, student_quantile

PLACED = LAYOUT | {"strategy": "single", "devices": 1, "pieces": 1, "accumulate_grad_batches": 1}


def one(folder: Path, fold: int | None, acc: float, val: int = 40, folds: int | None = 3, **more: Any) -> Path:
    """Return a run folder made by hand, with its validation accuracy and the number of its validation samples."""
    config = {"max_epochs": 1, "lr": more.pop("lr", 0.1), "seed": more.pop("seed", 0)}
    config["data"] = {"name": "any", "split_seed": more.pop("split_seed", 0), "folds": folds, "fold": fold}
    samples = {"train": more.pop("total", 100) - val, "val": val, "test": 9}
    metrics = {"val/acc": acc, "val/loss": 1 - acc, "test/acc": more.pop("test", acc)}
    written(folder, **({"status": "completed", "layout": PLACED, "samples": samples, "metrics": metrics} | more))
    (folder / ".hydra" / "config.yaml").write_text(json.dumps(config))
    return folder


def results(folder: Path) -> Any:
    return json.loads((folder / "compare" / "compare.json").read_text())


def cross_validation(folder: Path, **more: Any) -> None:
    for fold, (acc, val) in enumerate([(0.9, 40), (0.8, 30), (0.7, 30)]):
        one(folder / f"{more.get('lr', 0.1)} {more.get('seed', 0)} {fold}", fold, acc, val, **more)


def test_folds_are_one_row_with_one_score_of_all_samples(tmp_path: Path) -> None:
    cross_validation(tmp_path)
    cross_validation(tmp_path, seed=1)
    cross_validation(tmp_path, lr=0.2)
    done = compare(tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["lr"]: row for row in results(tmp_path)}
    assert [row["runs"] for row in rows.values()] == [6, 3]
    names = [each[""] for row in rows.values() for each in row["cross_validation"]]
    assert names == ["lr=0.1, seed=0", "lr=0.1, seed=1", "lr=0.2"]
    for scores in (each for row in rows.values() for each in row["cross_validation"]):
        assert scores["folds"] == 3
        assert scores["val acc"] == pytest.approx(0.8)
        assert scores["acc +-"] == pytest.approx(0.1)
        assert scores["out-of-fold acc"] == pytest.approx((36 + 24 + 21) / 100)
        assert scores["out-of-fold loss"] == pytest.approx(19 / 100)
    assert "\nval acc, val loss: means over the folds" in done.stdout
    assert "out-of-fold: all 100 samples as one set" in done.stdout
    assert "Cross-validation with 3 folds" in (tmp_path / "compare" / "compare.md").read_text()


def test_a_fold_that_failed_is_named_and_leaves_no_score(tmp_path: Path) -> None:
    cross_validation(tmp_path)
    one(tmp_path / "0.1 0 1", 1, 0.8, 30, status="failed", error="no luck")
    done = compare(tmp_path)
    (scores,) = results(tmp_path)[0]["cross_validation"]
    assert (scores["folds"], scores["val acc"], scores["out-of-fold acc"]) == ("2 of 3", pytest.approx(0.8), None)
    assert "no completed run of fold 1, so there is no out-of-fold score" in done.stdout


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (
            [{"fold": 0}, {"fold": 1, "folds": 5}, {"fold": 2}],
            "a has data.folds=3, {}/b has 5: they are folds of different splits",
        ),
        (
            [{"fold": 0}, {"fold": 1, "split_seed": 1}, {"fold": 2}],
            "a has data.split_seed=0, {}/b has 1: they are folds of different splits",
        ),
        ([{"fold": 0}, {"fold": 1}, {"fold": 1}], "b and {}/c are both fold 1: name the folders of one"),
        (
            [{"fold": 0}, {"fold": 1, "seed": 4}, {"fold": 2}],
            "a (fold 0) and {}/b (fold 1) differ in seed (0, 4): the folds of a cross-validation must share all",
        ),
        ([{"fold": 0}, {"fold": 1}, {"fold": 2, "lr": 0.3}], "(fold 2) differ in lr (0.1, 0.3): the folds of a cross"),
        (
            [{"fold": 0}, {"fold": 1, "total": 90}, {"fold": 2}],
            "a is a fold of 100 samples, {}/b of 90: the folds of a cross-validation must be of the same data",
        ),
    ],
)
def test_folds_that_do_not_belong_together_are_refused(
    tmp_path: Path, runs: list[dict[str, Any]], message: str
) -> None:
    for name, options in zip("abc", runs, strict=True):
        one(tmp_path / name, acc=0.5, **options)
    done = compare(tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {tmp_path}/")
    assert message.format(tmp_path) in done.stderr
    assert not (tmp_path / "compare").exists()


# --- noise ---


@pytest.mark.parametrize(
    ("probability", "degrees", "quantile"),  # of any table of Student's t
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 4.9, 2.776),
        (0.975, 5, 2.571),
        (0.975, 30, 2.042),
        (0.8, 9, 0.883),
    ],
)
def test_quantiles_are_those_of_the_tables(probability: float, degrees: float, quantile: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(quantile, abs=6e-4)


@pytest.mark.usefixtures("whole_run")
def test_how_often_a_difference_is_seen() -> None:
    """No difference in 1 of 20 cases, paired or not; a real one 4 times in 5 with as many seeds as it needs."""
    draw = random.Random(0).gauss

    def alarms(seeds: int, effect: float, paired: bool) -> float:
        seen = 0
        for _ in range(1000):
            shared = [draw(0, 3) for _ in range(seeds)]
            one = {(seed, None, 0): value + draw(0, 1) for seed, value in enumerate(shared)}
            others = shared if paired else [draw(0, 3) for _ in shared]
            other = {
                (seed + (not paired) * seeds, None, 0): value + draw(0, 1) + effect for seed, value in enumerate(others)
            }
            actual = difference(one, other)
            assert actual is not None
            assert actual.compared == (f"{seeds} pairs" if paired else f"{seeds} and {seeds} runs")
            seen += actual.verdict == "yes"
        return seen / 1000

    assert 0.03 < alarms(5, 0, paired=True) < 0.07
    assert 0.03 < alarms(5, 0, paired=False) < 0.07
    assert 5 + further_seeds(math.sqrt(2), 2.0, 5, 1) == 10, "the usual answer for a difference as large as its spread"
    assert 0.75 < alarms(10, math.sqrt(2), paired=True) < 0.85
    assert alarms(10, math.sqrt(2), paired=False) < 0.4, "unpaired, the seed hides it"


def test_folds_count_for_less_than_seeds() -> None:
    values = [0.0, 0.01, -0.01, 0.02, 0.03]
    seeds = difference({(n, None, 0): 0.0 for n in range(5)}, {(n, None, 0): v for n, v in enumerate(values)})
    folds = difference({(0, n, 5): 0.0 for n in range(5)}, {(0, n, 5): v for n, v in enumerate(values)})
    assert seeds is not None
    assert folds is not None
    assert folds.margin / seeds.margin == pytest.approx(math.sqrt((1 / 5 + 1 / 4) / (1 / 5)))
    assert (folds.further, seeds.further is None) == (None, False)


def test_rows_with_seeds_are_compared_with_the_first(tmp_path: Path) -> None:
    for seed in range(4):
        one(tmp_path / f"best {seed}", None, 0.9 + seed / 100, folds=None, lr=0.3, seed=seed)
        one(tmp_path / f"less {seed}", None, 0.88 + seed / 100 + seed % 2 / 1000, folds=None, lr=0.2, seed=seed)
        one(tmp_path / f"other {seed}", None, 0.89 + seed / 100, folds=None, lr=0.1, seed=seed + 9)
    done = compare(tmp_path)
    actual = {row["lr"]: row["noise"] for row in results(tmp_path)}
    assert actual["0.3"] == {}
    assert {name: each["compared"] for name, each in actual["0.2"].items()} == {
        "val/acc": "4 pairs",
        "test/acc": "4 pairs",
    }
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "pairs" in line]
    assert lines[0] == ["lr=0.2", "val/acc", "4 pairs", "-0.0195", "-0.0204 to -0.0186", "yes", "-"]
    (other,) = [line for line in done.stdout.splitlines() if "4 and 4 runs" in line and "val/acc" in line]
    assert [cell.strip() for cell in other.split("|")[5:-1]] == ["-0.0323 to +0.0123", "no", "24"]
    assert "Each row minus the first one, lr=0.3" in done.stdout
    assert "first one" not in compare(*tmp_path.glob("*0")).stdout
    assert "one run of a row does not show whether" in compare(*tmp_path.glob("*0")).stdout


@pytest.mark.usefixtures("processes")
def test_a_sweep_of_folds_is_scored(tmp_path: Path) -> None:
    run = Program(tmp_path)(
        *("-m", "data.fold=0,1", "data.folds=2", "data=synthetic", "data.samples=61", "data.num_classes=3"),
        *("data.image_size=12", "max_steps=2", "batch_size=16", "threads=1", "logger=none", "accelerator=cpu"),
    )
    sweep = run.jobs[0].parent
    assert compare(sweep).returncode == 0
    (scores,) = results(sweep)[0]["cross_validation"]
    metrics = [json.loads((job / "summary.json").read_text())["metrics"] for job in run.jobs]
    assert sorted(each["val/count"] for each in metrics) == [30, 31]
    right = sum(each["val/correct"] for each in metrics)
    assert scores["out-of-fold acc"] == pytest.approx(right / 61, abs=1e-12)
