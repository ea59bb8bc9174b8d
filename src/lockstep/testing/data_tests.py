"""Tests of a user's data set."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from threading import BrokenBarrierError
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.arithmetic.layout import resolve
from lockstep.commands.api import compose
from lockstep.data.build import open_data
from lockstep.data.datasets import UNLABELLED, Ids, fetch, labels_of
from lockstep.data.repeats import SEEDED, other_sample
from lockstep.data.splits import Spec, Splits
from lockstep.errors import UserError
from lockstep.launch.forks import call_in_forks
from lockstep.launch.parent import launch
from lockstep.testing.module_tests import fail
from lockstep.testing.runs import check_overrides
from lockstep.testing.server import server

SAMPLES = 16  # evenly spaced samples of each split that are compared
HANGING = 60.0  # seconds until a process that fetches samples counts as hanging
HANGS = "it hangs"
LEAST_ROUNDS, MOST_ROUNDS = 3, 50  # how often two processes fetch the same samples at the same time
EPOCHS = 2  # epochs whose first steps are compared
Result = TypeVar("Result")


class DataTests:
    """Tests of a data set. Inherit them: `class TestStripes(DataTests): overrides = ["data=stripes"]`.

    They fetch up to 16 evenly spaced samples of each split, with transforms. A test that can't hold for a data set is
    left out by setting it to None: `test_labels_are_in_range = None`.

    Attributes:
        overrides: command-line overrides that choose the data set, its options and transforms.
    """

    overrides: ClassVar[Sequence[str]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def splits(cls) -> Splits:
        """Open the data set; fail if it can't be opened."""
        return opened(cls.overrides)

    def test_images_are_as_the_spec_has_them(self, splits: Splits) -> None:
        """Check that images are uint8 or float, [channels, image_size, image_size]."""
        spec = splits.spec
        for name, _, batch in fetched(splits):
            if not (isinstance(batch, list | tuple) and len(batch) >= 2 and isinstance(batch[0], Tensor)):
                fail(f"a sample of {name} is no pair of tensors: return (image, label), the image a tensor [C, H, W]")
            shape, wanted = tuple(batch[0].shape[1:]), (spec.channels, spec.image_size, spec.image_size)
            if shape != wanted:
                sizes = [" x ".join(map(str, each)) for each in (shape, wanted)]
                fail(
                    f"images of {name} are {sizes[0]}, but the Spec has {sizes[1]}: return images [C, H, W] of one "
                    "size, and give Spec(channels=..., image_size=...) the same numbers"
                )
            if batch[0].dtype != torch.uint8 and not batch[0].is_floating_point():
                fail(f"images of {name} are {batch[0].dtype}: return uint8, 0 to 255, or normalised floats")

    def test_labels_are_in_range(self, splits: Splits) -> None:
        """Check that labels are int64, 0 to num_classes - 1, or that targets fit the task of the `Spec`."""
        for name, ids, batch in fetched(splits):
            labels = batch[1]
            if splits.spec.task != "classification":
                check_targets(name, labels, splits.spec)
                continue
            if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.ndim != 1:
                shown = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
                fail(
                    f"a batch of labels of {name} is {shown}: return one int or int64 tensor for each sample; for "
                    "another kind of target, give the Spec a task, or set test_labels_are_in_range = None"
                )
            check_range(name, ids, labels.numpy(), splits)
            if (stored := labels_of(getattr(splits, name))) is None:  # of all samples
                continue
            check_range(name, np.arange(len(stored)), stored, splits)
            if wrong := [int(at) for at, label in zip(ids, labels, strict=True) if int(label) != stored[at]]:
                fail(
                    f"sample {wrong[0]} of {name} has another label than its entry in the attribute `labels` or "
                    "`targets`: give both one order"
                )

    def test_opened_again_it_has_the_same_samples_in_the_same_order(
        self, splits: Splits, request: pytest.FixtureRequest
    ) -> None:
        """Check that another process that opens the data set gets the same samples, labels and classes."""
        expected, helper_process = digests(splits), server(request.session)
        try:
            results = helper_process.call("lockstep.testing.data_tests.reopened", overrides=list(self.overrides))
        except UserError as error:
            fail(f"another process could not open the data set: {error}")
        for what, value in expected.items():
            if results[what] != value:
                fail(
                    f"opened again, {what} differ: a data set must be the same in every process and every run: sort "
                    "what comes from a set or from listing a folder, and seed what is drawn "
                    "(numpy.random.default_rng(0))"
                )

    def test_the_order_of_a_step_is_a_pure_function(self, splits: Splits) -> None:
        """Check that the samples of a step follow from seed, epoch and step, whatever was computed before."""
        if len({len(splits.train) for _ in range(3)}) > 1 or steps(splits) != steps(splits, backwards=True):
            fail("the samples of a step differ when they are computed again: __len__ must always return the same")

    def test_a_sample_follows_from_seed_epoch_and_number(self, splits: Splits) -> None:
        """Check that a training sample with its transforms is the same alone, in a batch, and fetched again."""
        ids = chosen(splits.train)
        other = other_sample(splits.train, ids, 0, np.ones_like(ids))
        if other is not None:
            fail(f"sample {other} of train is another one when it is fetched again: {SEEDED}")
        first = samples_as_bytes(fetch(splits.train, ids, seed=0, epoch=1))
        reversed_batch = samples_as_bytes(fetch(splits.train, ids[::-1], seed=0, epoch=1))[::-1]
        batches = (fetch(splits.train, np.array([each]), seed=0, epoch=1) for each in ids)
        single_samples = [sample for batch in batches for sample in samples_as_bytes(batch)]
        if wrong := unequal(ids, first, reversed_batch) or unequal(ids, first, single_samples):
            fail(
                f"sample {wrong[0]} of train is another one in another batch: other layouts have other batches: let "
                "__getitems__ return a list of samples, each drawn by itself, or define __getitem__ only"
            )

    def test_validation_and_test_are_not_augmented(self, splits: Splits) -> None:
        """Check that samples of validation and test do not depend on the seed."""
        for name in ("val", "test"):
            if (part := getattr(splits, name)) is None:
                continue
            ids = chosen(part)
            one, other = (samples_as_bytes(fetch(part, ids, seed=seed, epoch=seed)) for seed in (0, 1))
            if wrong := unequal(ids, one, other):
                fail(
                    f"sample {wrong[0]} of {name} is random: give the Source val= and test= without augmentation, or "
                    "val_candidates= (the samples of train without augmentation, from which data.val_fraction and "
                    "data.folds choose), or augment by conf/data/transforms/"
                )

    def test_processes_that_fetch_at_the_same_time_get_the_same(self, request: pytest.FixtureRequest) -> None:
        """Check that two forked processes fetch the same bits at the same time: they must not share a file position."""
        overrides, helper_process = check_overrides(self.overrides), server(request.session)
        try:  # not in forks of pytest's process: it has threads, with which a fork may hang
            problem = helper_process.call("lockstep.testing.data_tests.forks_differ", overrides=overrides)
        except UserError as error:
            fail(f"another process could not open the data set: {error}")
        if problem:
            fail(
                f"two processes that fetch at the same time {problem}: open a file at first use in __getitem__, never "
                "in __init__, since forked processes share an open file's position"
            )


def opened(overrides: Sequence[str]) -> Splits:
    """Open the data set that overrides choose. Fail the test if it is refused."""
    try:
        return opened_here(check_overrides(overrides))
    except UserError as error:
        fail(f"{' '.join(overrides)}: {error}")


def check_range(name: str, ids: Ids, labels: Any, splits: Splits) -> None:
    """Fail the test if a label of a split is not 0 to num_classes - 1."""
    last = splits.spec.num_classes - 1
    outside = np.flatnonzero((labels < 0) | (labels > last))
    if len(outside):
        index = outside[0]
        fail(
            f"sample {ids[index]} of {name} has the label {labels[index]}, and the Spec has {last + 1} classes: "
            f"labels must be 0 to {last}, in the order of Spec(classes=...)"
        )


def check_targets(name: str, targets: Any, spec: Spec) -> None:
    """Fail the test if targets of a split do not fit the task of the `Spec`, which is not classification."""
    is_segmentation = spec.task == "segmentation"
    shape = (spec.image_size, spec.image_size) if is_segmentation else (spec.num_classes,)
    has_right_dtype = targets.dtype == torch.uint8 if is_segmentation else targets.is_floating_point()
    if not has_right_dtype or tuple(targets.shape[1:]) != shape:
        wanted = f"{'uint8' if is_segmentation else 'a float tensor'} {list(shape)}"
        fail(
            f"a target of {name} is {targets.dtype} {list(targets.shape[1:])}: return {wanted} for each sample, or "
            f"give the Spec another task than {spec.task}"
        )
    if is_segmentation:
        wrong = (targets >= spec.num_classes) & (targets != UNLABELLED)
        range_text = f"0 to {spec.num_classes - 1}, or {UNLABELLED} without a class"
    elif spec.task == "multi_label":
        wrong, range_text = (targets != 0) & (targets != 1), "0 or 1"
    else:
        wrong, range_text = ~targets.isfinite(), "finite"
    if bool(wrong.any()):
        fail(f"targets of {name} have the value {targets[wrong][0]:g}: values must be {range_text}")


def chosen(dataset: Any) -> Ids:
    """Return the numbers of up to SAMPLES samples, evenly spaced over a data set."""
    return np.unique(np.linspace(0, len(dataset) - 1, SAMPLES).astype(np.int64))


def fetched(splits: Splits) -> Iterator[tuple[str, Ids, Any]]:
    """Yield name, sample numbers and batch of each split, fetched as in the first epoch of a run."""
    for name in ("train", "val", "test"):
        if (part := getattr(splits, name)) is not None:
            ids = chosen(part)
            yield name, ids, fetch(part, ids)


def samples_as_bytes(batch: Any) -> list[bytes]:
    """Return the bytes of each sample of a batch.

    The first dimension of a tensor counts the samples. A list, tuple or dict has one entry for each field, such as
    image and label, with that field of all samples. Any other value is the field of a batch of one sample.
    """
    if isinstance(batch, Tensor):
        return [each.contiguous().numpy().tobytes() for each in batch]
    values = list(batch.values()) if isinstance(batch, dict) else batch
    if not isinstance(values, list | tuple):
        return [repr(values).encode()]
    return [b"".join(each) for each in zip(*map(samples_as_bytes, values), strict=False)]


def unequal(ids: Ids, one: Sequence[bytes], other: Sequence[bytes]) -> list[int]:
    """Return the numbers of the samples whose bytes differ."""
    return [int(number) for number, a, b in zip(ids, one, other, strict=False) if a != b]


def steps(splits: Splits, backwards: bool = False) -> dict[tuple[int, int], list[int]]:
    """Return the sample numbers of some steps by (epoch, step). `backwards`: the last step is computed first."""
    size = min(SAMPLES, len(splits.train))
    layout = resolve(strategy="single", accelerator="cpu", devices=1, num_nodes=1, batch_size=size)
    order = splits.order(layout, seed=0)
    places = [(epoch, step) for epoch in range(EPOCHS) for step in range(min(2, order.steps_per_epoch))]
    return {place: np.asarray(order.step(*place)).tolist() for place in (places[::-1] if backwards else places)}


def digests(splits: Splits) -> dict[str, Any]:
    """Return what must be the same in every process that opens the data set.

    The keys name the values in error messages. The values are plain data.
    """
    results: dict[str, Any] = {"the classes of the Spec": list(splits.spec.classes)}
    for name, _, batch in fetched(splits):
        results[f"the samples of {name}"] = [
            len(getattr(splits, name)),
            *(hashlib.sha256(sample).hexdigest() for sample in samples_as_bytes(batch)),
        ]
    return results


def reopened(overrides: list[str]) -> dict[str, Any]:
    """Open a data set in a new worker, and return its digests. The helper process of the tests calls this.

    Raises:
        UserError: The data set can't be opened.
        WorkerFailed: Its samples can't be fetched.
    """
    return in_worker(digests_of, overrides)


def forks_differ(overrides: list[str]) -> str:
    """Open a data set in a new worker. Return in what two forks of it differ that fetch at the same time, or "".

    The helper process of the tests calls this. Errors are those of `reopened`.
    """
    return in_worker(compare_forks, overrides)


def in_worker(function: Callable[[Sequence[str]], Result], overrides: list[str]) -> Result:
    """Return what a function of the overrides returns in a new worker."""
    layout = resolve(strategy="single", accelerator="cpu", devices=1, num_nodes=1, batch_size=1)
    result: Result = launch(function, overrides, layout=layout)
    return result


def digests_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Open a data set in this process, and return its digests. Its errors are those of `reopened`."""
    return digests(opened_here(overrides))


def compare_forks(overrides: Sequence[str]) -> str:
    """Open a data set in this process, and return in what two forks differ, or "". This process fetches nothing."""
    torch.set_num_threads(1)  # a fork does not have this process's threads
    splits = opened_here(overrides)
    [(alone, seconds)] = fetched_in_forks(splits, 1, 1)
    rounds = min(max(int(1 / max(seconds, 0.001)), LEAST_ROUNDS), MOST_ROUNDS)  # a second long, if that is enough
    both = [alone, *(fetched for fetched, _ in fetched_in_forks(splits, 2, rounds))]
    failed = sorted((fetched for fetched in both if isinstance(fetched, str)), key=HANGS.__eq__)
    if failed:
        return f"fail ({failed[0]})"
    return "" if all(digest == alone[0] for fetched in both for digest in fetched) else "get other samples"


def fetched_in_forks(splits: Splits, count: int, rounds: int) -> list[tuple[list[dict[str, Any]] | str, float]]:
    """Let forks fetch the chosen samples at the same time, several times.

    Returns:
        By fork, the digests of each time, or its error; and the seconds that it has taken.
    """
    begin = get_context("fork").Barrier(count, timeout=HANGING)

    def fetch_all() -> tuple[list[dict[str, Any]] | str, float]:
        started, fetched = time.monotonic(), []
        try:
            for _ in range(rounds):
                begin.wait()  # otherwise a process that starts first may end before the other begins
                fetched.append(digests(splits))
        except BaseException as error:
            begin.abort()  # so the other process does not wait
            return HANGS if isinstance(error, BrokenBarrierError) else f"{type(error).__name__}: {error}", 0.0
        return fetched, time.monotonic() - started

    answers = call_in_forks(*[fetch_all] * count, seconds=(rounds + 1) * HANGING)
    return [(str(each) or HANGS, 0.0) if isinstance(each, Exception) else each for each in answers]


def opened_here(overrides: Sequence[str]) -> Splits:
    """Open the data set that overrides choose."""
    config = compose(*overrides)
    return open_data(config["data"], config["data_dir"], config["seed"])
