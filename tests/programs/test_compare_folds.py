"""lockstep compare: cross-validations, and whether a difference is larger than the noise."""

import json
import math
import random
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from conftest import Program
from programs.compared_runs import LAYOUT, compare, written

from lockstep.programs.comparison.noise import compare as difference

PLACED = LAYOUT | {"strategy": "single", "devices": 1, "pieces": 1, "accumulate_grad_batches": 1}


def one(folder: Path, fold: int | None, acc: float, val: int = 40, folds: int | None = 3, **more: Any) -> Path:
    """Return a run folder made by hand, with its validation accuracy and the number of its validation samples."""
    config = {"max_epochs": 1, "lr": more.pop("lr", 0.1), "seed": more.pop("seed", 0)}
    config["data"] = {"name": "any", "split_seed": more.pop("split_seed", 0), "folds": folds, "fold": fold}
    samples = {"train": more.pop("total", 100) - val, "val": val, "test": 9}
    metrics = {"val/acc": acc, "val/loss": 1 - acc, "test/acc": more.pop("test", acc)}
    report = {"status": "completed", "layout": PLACED, "samples": samples, "metrics": metrics}
    return written(folder, config, **(report | more))


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


@pytest.mark.parametrize(("pairs", "quantile"), [(2, 12.706), (3, 4.303), (6, 2.571)])  # of any table of Student's t
def test_quantiles_are_those_of_the_tables(pairs: int, quantile: float) -> None:
    values = {(seed, None, 0): (-1.0) ** seed for seed in range(pairs)}
    actual = difference(dict.fromkeys(values, 0.0), values)
    assert actual is not None
    assert actual.margin == pytest.approx(quantile * stdev(values.values()) / math.sqrt(pairs), rel=3e-4)


@pytest.mark.usefixtures("whole_run")
def test_how_often_a_difference_is_seen() -> None:
    """No difference in 1 of 20 cases; a real one 4 times in 5 with as many seeds as a t test needs."""
    draw = random.Random(0).gauss

    def alarms(seeds: int, effect: float) -> float:
        seen = 0
        for _ in range(1000):
            shared = [draw(0, 3) for _ in range(seeds)]
            one, other = (
                {(seed, None, 0): value + draw(0, 1) + shift for seed, value in enumerate(shared)}
                for shift in (0, effect)
            )
            actual = difference(one, other)
            assert actual is not None
            assert actual.pairs == seeds
            seen += actual.verdict == "yes"
        return seen / 1000

    assert 0.03 < alarms(5, 0) < 0.07
    assert 0.75 < alarms(10, math.sqrt(2)) < 0.85


def test_folds_count_for_less_than_seeds() -> None:
    values = [0.0, 0.01, -0.01, 0.02, 0.03]
    seeds = difference({(n, None, 0): 0.0 for n in range(5)}, {(n, None, 0): v for n, v in enumerate(values)})
    folds = difference({(0, n, 5): 0.0 for n in range(5)}, {(0, n, 5): v for n, v in enumerate(values)})
    assert seeds is not None
    assert folds is not None
    assert folds.margin / seeds.margin == pytest.approx(math.sqrt((1 / 5 + 1 / 4) / (1 / 5)))


def test_rows_with_seeds_are_compared_with_the_first(tmp_path: Path) -> None:
    for seed in range(4):
        one(tmp_path / f"best {seed}", None, 0.9 + seed / 100, folds=None, lr=0.3, seed=seed)
        one(tmp_path / f"less {seed}", None, 0.88 + seed / 100 + seed % 2 / 1000, folds=None, lr=0.2, seed=seed)
        one(tmp_path / f"other {seed}", None, 0.89 + seed / 100, folds=None, lr=0.1, seed=seed + 9)
    done = compare(tmp_path)
    actual = {row["lr"]: row["noise"] for row in results(tmp_path)}
    assert actual["0.3"] == {}
    assert {name: each["pairs"] for name, each in actual["0.2"].items()} == {"val/acc": 4, "test/acc": 4}
    assert actual["0.1"] == {}
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "/acc" in line]
    assert ["lr=0.2", "val/acc", "4", "-0.0195", "-0.0204 to -0.0186", "yes"] in lines
    assert "1 row has fewer than two runs with the seed of a run of the first row" in done.stdout
    assert "Each row minus the first one, lr=0.3" in done.stdout
    assert "first one" not in compare(*tmp_path.glob("*0")).stdout
    assert (
        "2 rows have fewer than two runs with the seed of a run of the first row"
        in compare(*tmp_path.glob("*0")).stdout
    )


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
