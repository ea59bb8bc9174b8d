"""`DataTests`: a data set without a fault passes them all, and each fault fails its test with a message that helps."""

from pathlib import Path
from typing import Any

import broken_code
import numpy as np
import pytest
import torch
from broken_code import IMAGES, LABELS, SIZE, SPEC, Items

from lockstep import ArrayDataset, Spec
from lockstep.data import Splits
from lockstep.testing import DataTests, data_tests

NAMES = sorted(name for name in vars(DataTests) if name.startswith("test_"))


def overrides(opener: str) -> list[str]:
    return ["~data", f"+data._target_=broken_code.{opener}", "+data.name=broken"]


@pytest.mark.usefixtures("processes")
class TestSound(DataTests):
    overrides = overrides("sound")


def splits(train: Any, val: Any = None, spec: Spec = SPEC) -> Splits:
    return Splits(train, val, None, spec, "")


IMAGES_TEST, LABELS_TEST = "images_are_as_the_spec_has_them", "labels_are_in_range"
ORDER, KEYED = "the_order_of_a_step_is_a_pure_function", "a_sample_follows_from_seed_epoch_and_number"
PLAIN, REOPENED = "validation_and_test_are_not_augmented", "opened_again_it_has_the_same_samples_in_the_same_order"
SHARED = "processes_that_fetch_at_the_same_time_get_the_same"
ARRAYS = ArrayDataset(IMAGES, LABELS)
FAULTS = [
    (IMAGES_TEST, splits(broken_code.Texts()), r"a sample of train is no pair of tensors: return \(image, label\)"),
    (
        IMAGES_TEST,
        splits(ARRAYS, spec=Spec(3, SIZE, tuple("abc"))),
        "are 1 x 12 x 12, but the Spec has 3 x 12 x 12",
    ),
    (IMAGES_TEST, splits(ARRAYS, spec=Spec(1, 14, tuple("abc"))), r"train are 1 x 12 x 12, .*give Spec\(channels="),
    (IMAGES_TEST, splits(broken_code.Integers()), "images of train are torch.int32: return uint8"),
    (
        LABELS_TEST,
        splits(ARRAYS, spec=Spec(1, SIZE, tuple("ab"))),
        "the label 2, and the Spec has 2 classes: .* be 0 to 1",
    ),
    (LABELS_TEST, splits(ArrayDataset(IMAGES, LABELS - 1)), "sample 0 of train has the label -1"),
    (LABELS_TEST, splits(broken_code.TurnedLabels()), "sample 0 of train has another label than its entry in .*labels"),
    (LABELS_TEST, splits(broken_code.FloatLabels()), r"is torch.float32 \[16\]: .*set test_labels_are_in_range = None"),
    (ORDER, splits(broken_code.OtherLengths()), "of a step differ when .*must always return the same"),
    (KEYED, splits(broken_code.Unseeded()), r"another one when it is fetched again: .*numpy.random.default_rng\(\)"),
    (KEYED, splits(broken_code.DrawsNothing()), "another one when it is fetched again: .*uses_random_numbers = False"),
    (KEYED, splits(broken_code.Counted()), "another one when it is fetched again: .*keep no state between calls"),
    (KEYED, splits(broken_code.DrawnTogether()), "in another batch: .*let __getitems__ return a list of samples"),
    (PLAIN, splits(Items(), broken_code.Augmented()), "of val is random: give the Source val= .*or val_candidates="),
]


@pytest.mark.parametrize(("test", "data", "message"), FAULTS)
def test_a_fault_is_detected_and_named(test: str, data: Splits, message: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=message):
        getattr(DataTests(), f"test_{test}")(data)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("opener", "what"), [("shuffled", "the samples of train"), ("classes_of_a_set", "the classes of the Spec")]
)
def test_what_is_another_one_when_it_is_opened_again(opener: str, what: str, request: pytest.FixtureRequest) -> None:
    class Broken(DataTests):
        overrides = overrides(opener)

    opened = data_tests.opened(Broken.overrides)
    with pytest.raises(pytest.fail.Exception, match=f"opened again, {what} differ: .*sort what comes from a set"):
        getattr(Broken(), f"test_{REOPENED}")(opened, request)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_a_file_that_processes_share(delay: float, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """It is noticed, also on a busy machine, where one process begins later than the other needs for all samples."""

    class Broken(DataTests):
        overrides = [*overrides("shared_file"), f"+data.folder={tmp_path}", f"+data.delay={delay}"]

    getattr(Broken(), f"test_{KEYED}")(data_tests.opened(Broken.overrides))  # the control: in one process
    with pytest.raises(pytest.fail.Exception, match="open a file at first use in __getitem__"):
        getattr(Broken(), f"test_{SHARED}")(request)


@pytest.mark.usefixtures("processes")
def test_a_file_that_each_process_opens(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    class Lazy(DataTests):
        overrides = [*overrides("lazy_file"), f"+data.folder={tmp_path}"]

    getattr(Lazy(), f"test_{SHARED}")(request)


@pytest.mark.usefixtures("processes")
def test_the_error_of_a_fork_is_shown(request: pytest.FixtureRequest) -> None:
    class Fails(DataTests):
        overrides = overrides("failing_fork")

    with pytest.raises(pytest.fail.Exception, match=r"fetch at the same time fail \(OSError: no such file here\): "):
        getattr(Fails(), f"test_{SHARED}")(request)


def test_every_test_has_a_fault_that_it_finds() -> None:
    assert {f"test_{test}" for test in (*(test for test, *_ in FAULTS), REOPENED, SHARED)} == set(NAMES)


def test_what_cant_be_opened_is_reported() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"overrides = 'data=mine': must be a list of texts"):
        data_tests.opened("data=mine")
    with pytest.raises(pytest.fail.Exception, match=r"data=digts: .*did you mean digits"):
        data_tests.opened(["data=digts"])


def test_samples_of_a_batch_are_distinguished() -> None:
    ids = np.arange(4)
    one = data_tests.samples_as_bytes([ARRAYS.images[:4], ARRAYS.labels[:4]])
    other = data_tests.samples_as_bytes([ARRAYS.images[:4], ARRAYS.labels[:4] + torch.tensor([0, 0, 1, 0])])
    assert data_tests.unequal(ids, one, one) == []
    assert data_tests.unequal(ids, one, other) == [2]
