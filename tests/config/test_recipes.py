"""Recipes and debug modes: each fits the schema, also on top of each other, and each debug mode does what it says."""

import json

import pytest
from conftest import Program, composed

from lockstep.config.check import Config, check
from lockstep.config.pages import options

pytestmark = pytest.mark.usefixtures("whole_run")

EXPERIMENTS = options("experiment")
DEBUGS = options("debug")
LAYOUT = ("accelerator=cpu", "strategy=ddp", "devices=2", "pieces=4", "threads=1")
SMALL = ("data=synthetic", "data.samples=300", "data.image_size=12", "batch_size=32")


def checked(*overrides: str) -> Config:
    return check(composed("accelerator=cpu", *overrides))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_recipe_passes_the_checks_and_a_debug_mode_goes_on_top(
    experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.config.check.computes_bf16", lambda accelerator: False)
    config = checked(f"experiment={experiment}")
    assert config.record != checked().record
    assert config.precision == "32-true", "no recipe emulates bf16"
    debug = DEBUGS[EXPERIMENTS.index(experiment) % len(DEBUGS)]  # each with one recipe at least
    debugged = checked(f"experiment={experiment}", f"debug={debug}")
    assert (debugged.name, debugged.model) == (f"debug_{debug}", config.model)


def test_each_debug_mode_is_on_top_of_a_recipe() -> None:
    assert 0 < len(DEBUGS) <= len(EXPERIMENTS)


def test_batch_goes_through_training_validation_and_test(run_train: Program) -> None:
    run = run_train("debug=batch", *LAYOUT, *SMALL)
    metrics = run.summary["metrics"]
    assert (run.summary["steps"], run.summary["samples_seen"]) == (1, 32)
    assert metrics["val/count"] > 0
    assert 0 < metrics["test/count"] < 60  # not the whole test set
    assert (run.folder / "checkpoints" / "best.ckpt").is_file()


def test_overfit_learns_one_batch_by_heart(run_train: Program) -> None:
    run = run_train("debug=overfit", *LAYOUT, *SMALL)
    metrics = run.summary["metrics"]
    assert (run.summary["steps"], run.summary["samples_seen"]) == (150, 4800)
    assert metrics["train/loss"] < 0.01
    assert metrics["train/acc"] == 1
    assert not [name for name in metrics if name.startswith(("val/", "test/"))]


def test_profile_leaves_a_trace_and_a_table(run_train: Program) -> None:
    run = run_train("debug=profile", *LAYOUT, *SMALL)
    for rank in "01":
        (trace,) = (run.folder / "profile").glob(f"fit-operations-{rank}-*.pt.trace.json")
        names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
        assert len({name for name in names if name.startswith("ProfilerStep#")}) == 8
        assert names.count("aten::convolution_backward") == 8 * 2  # pieces, layers
        assert "ProfilerStep*" in (run.folder / "profile" / f"fit-operations-{rank}.txt").read_text()
    assert "profiler_start" not in run.stderr, run.stderr  # of its library
