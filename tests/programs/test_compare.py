"""What lockstep compare shows of run folders."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Program
from programs.compared_runs import LAYOUT, compare, written
from torch.utils.tensorboard import SummaryWriter

from lockstep.programs.comparison.facts import differing_values, facts
from lockstep.programs.comparison.runs import find_runs, group_runs, read_curves

TINY = ("data=synthetic", "data.samples=200", "data.image_size=12", "max_steps=2", "batch_size=32", "threads=1")


@pytest.mark.usefixtures("processes")
def test_two_runs_and_the_curves_of_one(tmp_path: Path) -> None:
    one = Program(tmp_path / "one")(*TINY, "logger=tensorboard", "max_steps=12", "log_every=2")
    two = Program(tmp_path / "two")(*TINY, "strategy=dp", "devices=2", "lr=0.07")
    done = compare(one.folder, two.folder)
    assert done.returncode == 0, done.stderr
    actual = {row["layout"]: row for row in json.loads((tmp_path / "compare" / "compare.json").read_text())}
    assert [actual[layout]["lr"] for layout in ("single 1 device", "dp 2 devices, 2 pieces")] == ["0.02", "0.07"]
    assert "seed" not in actual["single 1 device"]

    curves = read_curves(one.folder, one.summary)
    assert curves["train/loss"].samples[-1] == one.summary["samples_seen"]
    assert curves["val/acc"].values[-1] == pytest.approx(one.summary["metrics"]["val/acc"])
    done = compare(one.folder)
    (row,) = json.loads((one.folder / "compare" / "compare.json").read_text())
    assert 0 < row["GiB"] < 10
    for name in ("loss.png", "accuracy.png"):
        assert name in done.stdout
        assert (one.folder / "compare" / name).stat().st_size > 10_000


def test_shards_that_were_replaced_are_other_data(tmp_path: Path) -> None:
    """Of a run that has read a folder nobody knows the bytes, so it differs from none."""
    one, other, folder = (written(tmp_path / name, status="completed", layout=LAYOUT) for name in ("one", "other", "c"))
    for run, content in ((one, "a" * 64), (other, "b" * 64), (folder, None)):
        made = {"config": {"lr": 0.1}, "data_fingerprint": "f" * 64, "data_content": content}
        (run / "provenance.json").write_text(json.dumps(made))
    data = [facts(run)["data"] for run in (one, other, folder)]
    assert differing_values(data[0], data[1]) == {"shards": ("a" * 64, "b" * 64)}
    assert differing_values(data[0], data[2]) == {}


def test_a_run_without_a_step_differs_in_what_was_chosen_alone(tmp_path: Path) -> None:
    """Runs record the modes and rates that follow; such a run has the config as it was composed."""
    layout = {**LAYOUT, "strategy": "single", "devices": 1, "pieces": 1}
    for name, lr in (("one", 0.01), ("two", 0.02)):
        run = written(tmp_path / name, status="completed", layout=layout, metrics={"test/acc": 0.5})
        config = {"lr": lr, "max_epochs": 2, "callbacks": {"checkpoint": {"mode": "max"}}, "optimizer": {"name": "sgd"}}
        (run / "provenance.json").write_text(json.dumps({"config": config}))
    cut = written(tmp_path / "cut", status="interrupted", layout=layout)
    (cut / ".hydra" / "config.yaml").write_text(
        "lr: 0.03\nmax_epochs: 2\ncallbacks: {checkpoint: {mode: null}}\noptimizer: {name: sgd, lr: 0.02}\n"
    )
    groups = group_runs(find_runs([tmp_path]))
    assert sorted(str(group.differing_values) for group in groups) == ["{'lr': 0.01}", "{'lr': 0.02}", "{'lr': 0.03}"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such folder"),
        ("", "has no runs: name a run folder"),
        ("{", "can't be read"),
        ("[1]", "not a mapping"),
    ],
)
def test_what_is_no_run_is_named(tmp_path: Path, content: str | None, reason: str) -> None:
    good, bad = written(tmp_path / "good"), tmp_path / "bad"
    if content is not None:
        bad.mkdir()
    if content:
        (bad / "summary.json").write_text(content)
    done = compare(good, bad)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {bad}")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


# Any number of runs


def job(folder: Path, devices: int, seed: int, acc: float, speed: float, lr: float = 0.1, **summary: Any) -> None:
    """Return a run by hand, of a sweep over devices, seeds and rates."""
    layout = LAYOUT | {"strategy": "ddp", "devices": devices, "accumulate_grad_batches": 1, "pieces": devices}
    report = {"status": "completed", "layout": layout, "metrics": {"test/acc": acc, "val/acc": acc / 2}}
    report["throughput"] = {"samples_per_second": speed, "seconds": 2.0}
    config = {"lr": lr, "seed": seed, "devices": devices, "batch_size": 32, "strategy": {"name": "ddp"}}
    written(folder, config | {"max_epochs": 1}, **(report | summary))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for number, (devices, seed, acc, speed) in enumerate(
        [(1, 0, 0.5, 90.0), (1, 1, 0.7, 110.0), (2, 0, 0.8, 150.0), (2, 1, 0.6, 150.0)]
    ):
        job(tmp_path / str(number), devices, seed, acc, speed)
    job(tmp_path / "10", 2, 2, 0.1, 1.0, status="failed", error="no luck")
    return tmp_path


def test_seeds_are_one_row(sweep: Path) -> None:
    done = compare(sweep)
    assert done.returncode == 0, done.stderr
    two, one = report = json.loads((sweep / "compare" / "compare.json").read_text())
    assert [row["layout"] for row in report] == ["ddp 2 devices, 2 pieces", "ddp 1 device"], "the best comes first"
    assert [row["runs"] for row in report] == ["2 of 3", 2]
    assert one["test acc"] == pytest.approx(0.6)
    assert one["+-"] == pytest.approx(0.1414, abs=1e-4)
    assert (one["val acc"], one["samples/s"], one["seconds"], one["GiB"]) == (0.3, 100, 2, None)
    assert [row["efficiency"] for row in report] == [0.75, 1.0], "150 on two devices, 100 on one"
    assert list(two["folders"].values()) == ["completed", "completed", "failed"]
    assert "10 (ddp 2 devices, 2 pieces): failed, no luck" in done.stdout
    assert [row["samples/s"] for row in report] == [150, 100]
    page = (sweep / "compare" / "compare.md").read_text()
    shown = "| 2, 3, 10 | ddp 2 devices, 2 pieces | 32 | 2 of 3 | 0.3500 | 0.7000 | 0.1414 | 150 | 75% | - | 2.0 |"
    assert shown in re.sub(" +", " ", page)
    assert shown in re.sub(" +", " ", done.stdout)
    assert done.stdout.endswith("compare: compare.md, compare.json\n")


def test_what_differs_is_a_column_and_no_other_run_is_its_yardstick(sweep: Path) -> None:
    job(sweep / "11", 2, 0, 0.9, 300.0, lr=0.2)
    assert compare(sweep, "--to", sweep / "there").returncode == 0
    report = json.loads((sweep / "there" / "compare.json").read_text())
    assert [(row["layout"], row["lr"], row["efficiency"]) for row in report] == [
        ("ddp 2 devices, 2 pieces", "0.2", None),
        ("ddp 2 devices, 2 pieces", "0.1", 0.75),
        ("ddp 1 device", "0.1", 1.0),
    ]


def test_validation_chooses_and_test_is_shown(tmp_path: Path) -> None:
    for number, (val, test) in enumerate([(0.7, 0.9), (0.8, 0.6)]):
        job(tmp_path / str(number), 1, 0, test, 90.0, lr=number, metrics={"val/acc": val, "test/acc": test})
    for number, loss in ((2, 0.5), (3, 0.4)):  # no classifier, so that its loss decides
        job(tmp_path / str(number), 1, 0, 0.0, 90.0, lr=number, metrics={"val/loss": loss})
    done = compare(tmp_path)
    report = json.loads((tmp_path / "compare" / "compare.json").read_text())
    assert [(row["folder"], row["val acc"], row["test acc"]) for row in report] == [
        *[("1", 0.8, 0.6), ("0", 0.7, 0.9)],
        *[("3", None, None), ("2", None, None)],
    ]
    assert f"best by val/acc (larger is better): {os.path.relpath(tmp_path / '1')}\n" in done.stdout, done.stderr
    assert "took the same steps" not in done.stdout, "their lr differs"


def test_rows_that_took_the_same_steps_are_named(tmp_path: Path) -> None:
    """Jobs that differ in layout and threads, and controls: another batch of pieces, another seed, another lr."""

    def one(number: int, name: str, devices: int, pieces: int, seed: int = 0, lr: float = 0.1, **more: Any) -> None:
        layout = LAYOUT | {"strategy": name, "devices": devices, "pieces": pieces, "exact": more.get("exact", False)}
        job(
            tmp_path / str(number), devices, seed, 0.5, 90.0, layout=layout, weights_sha256=more.pop("sha", str(number))
        )
        config = {"lr": lr, "seed": seed, "devices": devices, "pieces": None, "batch_size": 32, "max_epochs": 1, **more}
        strategy = {"name": name} | ({"compression": "none", "sync_batchnorm": False} if name == "ddp" else {})
        (tmp_path / str(number) / ".hydra" / "config.yaml").write_text(json.dumps(config | {"strategy": strategy}))

    one(0, "ddp", 2, 2, threads=1)
    one(1, "dp", 2, 2, threads=2)
    one(2, "single", 1, 1)
    one(3, "single", 1, 2, seed=1)
    one(4, "single", 1, 2, lr=0.2)
    one(5, "ddp", 2, 2, exact=True, sha="same")
    one(6, "dp", 2, 2, exact=True, sha="same")
    one(7, "ddp", 2, 2, exact=True, lr=0.3)
    one(8, "dp", 2, 2, exact=True, lr=0.3)
    report = [line for line in compare(tmp_path).stdout.splitlines() if re.match(r"\d \(", line)]
    rows = [f"{n} (ddp 2 devices, 2 pieces) and {n + 1} (dp 2 devices, 2 pieces)" for n in (0, 5, 7)]
    assert report == [
        f"{rows[0]} took the same steps up to rounding, which depends on layout and threads: "
        "exact=true removes this too.",
        f"{rows[1]} took the same steps, to the same bits of the weights.",
        f"{rows[2]} should have the same bits, but do not: `lockstep parity` shows where they differ.",
    ]


def test_what_trained_nothing_is_left_out_and_counted(sweep: Path) -> None:
    assert "left out" not in compare(sweep, "--to", sweep / "alone").stdout
    for name in ("evaluation", "export"):
        written(sweep / "others" / name, layout=LAYOUT | {"strategy": "single", "devices": 1, "pieces": 1})
    assert "left out: 2 folders of runs that did not train\n" in compare(sweep, "--to", sweep / "beside").stdout
    assert (sweep / "alone" / "compare.json").read_text() == (sweep / "beside" / "compare.json").read_text()
    assert len(group_runs(find_runs([sweep / "others"]))[0].runs) == 2, "among themselves they are compared"


@pytest.mark.parametrize("name", ["train/loss", "train/loss_step"])  # Lightning's, of one that is logged twice
def test_curves_of_a_run_that_went_on_later(tmp_path: Path, name: str) -> None:
    """Stopped at step 3, continued an hour later from step 2: its clock stands still, and step 3 counts once."""
    for start, steps in ((1000.0, (1, 2, 3)), (4600.0, (3, 4))):
        writer = SummaryWriter(str(tmp_path / "tensorboard"))
        for number, step in enumerate(steps):
            writer.add_scalar(name, 10.0 * step + (start > 4000), step, walltime=start + number)
        writer.close()
    curve = read_curves(tmp_path, {"steps": 4, "samples_seen": 126})["train/loss"]
    assert curve.values.tolist() == [10, 20, 31, 41]
    assert curve.samples.tolist() == [31.5, 63, 94.5, 126]
    assert np.diff(curve.seconds).max() <= 2
