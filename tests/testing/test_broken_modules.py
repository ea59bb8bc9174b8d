"""`ModuleTests`: a module without a fault passes them all, and each fault fails its test with a message that helps."""

from pathlib import Path
from typing import Any

import pytest
from broken_code import JUDGED

from lockstep.testing import ModuleTests
from lockstep.testing.runs import Runs
from lockstep.testing.server import server

DATA = ("~model", "data=synthetic", "data.samples=100", "data.image_size=12", "data.num_classes=3")

NAMES = sorted(name for name in vars(ModuleTests) if name.startswith("test_"))


def overrides(module: str) -> list[str]:
    return [*DATA, f"+model._target_=broken_code.{module}", "+model.name=broken"]


@pytest.mark.usefixtures("processes")
class TestSound(ModuleTests):
    overrides = overrides("Sound")


STATE = r"depends on a state that it changes itself \(count\), .*: compute it from self.global_step"
FAULTS = [
    ("Sum", "training_step_returns_a_mean", JUDGED["Sum"]),
    ("Neighbours", "a_sample_does_not_depend_on_its_batch", JUDGED["Neighbours"]),
    ("CountsSamples", "pieces_share_what_they_change", JUDGED["CountsSamples"]),
    ("Counts", "a_repetition_has_the_same_bits", JUDGED["Counts"]),
    ("Counts", "a_layout_has_the_same_weights", f"strategy=ddp devices=2 .*net.1.weight.*{STATE}"),
    ("Counts", "a_killed_run_continues_to_the_same_bits", STATE),
    ("ByRank", "a_layout_has_the_same_bits_with_exact", f"strategy=ddp devices=2 .*net.1.weight.*{JUDGED['ByRank']}"),
    (
        "CountsInHooks",
        "a_layout_has_the_same_weights",
        "strategy=ddp devices=2 .*net.1.weight.*lockstep docs module-ru",
    ),
    ("OtherWeights", "it_builds", "built twice with one seed, the module has other weights: net.1.weight: draw them"),
    ("NotPlain", "its_hyperparameters_are_plain", r"activation \(function\): .*save_hyperparameters\(ignore=\['activ"),
    ("Reads", "no_line_waits_for_a_gpu", r"wait at each call of \S*broken_code.py:\d+: compute with tensors instead"),
    ("OnHost", "every_constant_is_on_the_gpu", r"broken_code.py:\d+ would have a tensor that is on the CPU: make a"),
    ("NotExported", "it_exports", "can't be exported for batches of 1, 2, 7: .*without `if` and loops that depend on"),
    ("Resized", "it_exports", "on_after_batch_transfer changes images in evaluation, .*move this into forward"),
    ("NoForward", "it_exports", "has no forward: define it"),
    ("Still", "it_trains", "4 steps changed no weight: training_step must return a loss that follows from the weights"),
    ("Infinite", "it_trains", "the run with strategy=auto precision=32-true exact=true failed: .*"),
    ("Fails", "it_trains", "the run with strategy=auto .* failed: .*the shapes do not fit"),
    ("CountsBatches", "evaluation_counts_each_sample_once", "test/loss is .* in batches of one .*without batch_size="),
    ("Collects", "evaluation_counts_each_sample_once", "test/wrong is .* on one device and .* on two: .*one device's"),
]
FIRST = {test: module for module, test, _ in reversed(FAULTS)}  # of each test; the others are left to `make nightly`
CASES = [
    pytest.param(module, test, message, id=f"{module}-{test}", marks=[pytest.mark.nightly] * (FIRST[test] != module))
    for module, test, message in FAULTS
]


@pytest.fixture(scope="module")
def runs_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that returns the runs of a broken module."""
    made: dict[str, Runs] = {}

    def runs(module: str) -> Runs:
        if module not in made:
            made[module] = Runs(overrides(module), tmp_path_factory.mktemp(module), server(request.session))
        return made[module]

    return runs


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("module", "test", "message"), CASES)
def test_a_fault_is_detected_and_named(module: str, test: str, message: str, runs_of: Any) -> None:
    more = ["ddp"] if "layout" in test else []
    with pytest.raises(pytest.fail.Exception, match=f"(?s){message}"):
        getattr(ModuleTests(), f"test_{test}")(runs_of(module), *more)


def test_every_test_has_a_fault_that_it_finds() -> None:
    assert {f"test_{test}" for _, test, _ in FAULTS} == set(NAMES)


@pytest.mark.usefixtures("processes")
def test_what_cant_be_run_is_reported(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"overrides = 'model=mine': must be a list of texts"):
        Runs("model=mine", tmp_path, server(request.session))
    wrong = Runs(["model=mnist_cn"], tmp_path, server(request.session))
    with pytest.raises(pytest.fail.Exception, match="failed: model=mnist_cn: did you mean mnist_cnn"):
        ModuleTests().test_it_trains(wrong)
