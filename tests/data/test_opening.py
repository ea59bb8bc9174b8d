"""Opening a data set: embedded ones, what is held out, and options."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, List, Optional  # noqa: UP035

import numpy as np
import pytest
import torch
from conftest import composed
from PIL import Image
from small_data import arrays, config, refusal_of

from lockstep.arithmetic.order import hash64
from lockstep.checkpoint.io import AtomicCheckpointIO, load
from lockstep.config.check import check
from lockstep.data import Source, Spec
from lockstep.data.build import hold_out, open_data
from lockstep.data.datasets import fetch, fingerprint
from lockstep.errors import UserError
from lockstep.job.evaluation import evaluate


def test_digits_split_is_stratified_and_fixed() -> None:
    actual = open_data(config("digits"), "nowhere")
    counts = np.bincount(actual.test.labels.numpy())
    assert len(actual.train) + len(actual.val) + len(actual.test) == 1797
    assert len(actual.test) == 359
    assert counts.min() >= 35
    assert counts.max() <= 37
    # a changed split or enlargement would make every published number incomparable
    assert actual.fingerprint == open_data(config("digits"), "elsewhere", seed=9).fingerprint
    assert fingerprint(actual.test).startswith("6cf35046c249215d")


@pytest.mark.parametrize("seed", [0, 3])
def test_validation_samples_are_those_of_smallest_hash(seed: int) -> None:
    """`hold_out` selects without sorting; here they are sorted. A larger fraction only adds."""
    order = np.argsort(hash64(seed, 0x5B117, np.arange(1000)), kind="stable")
    for count in (100, 300):
        train, val = hold_out(arrays(1000), count / 1000, seed)
        assert sorted(order[:count]) == list(val.indices)
        assert sorted(order[count:]) == list(train.indices)
    assert hold_out(arrays(5), 0.0, seed)[1] is None


def test_each_class_keeps_an_image_for_training() -> None:
    order = np.argsort(hash64(0, 0x5B117, np.arange(20)), kind="stable")
    labels = np.arange(20, dtype=np.int64) % 4
    labels[order[:2]] = 7, 8  # they would be the first for validation
    train, val = hold_out(arrays(20), 0.2, 0, None, labels)
    assert sorted(order[2:6]) == list(val.indices)
    assert set(labels[train.indices]) == set(labels)
    assert sorted(order[:4]) == list(hold_out(arrays(20), 0.2, 0)[1].indices), "the control"
    assert sorted(order[:4]) == list(hold_out(arrays(20), 0.2, 0, None, np.arange(20))[1].indices), "one of each"


def test_a_source_may_have_no_test_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(arrays(20), None, Spec(1, 6, ("a", "b")))
    monkeypatch.setattr("lockstep.data.build.instantiate", lambda *args, **offers: source)
    actual = open_data({"_target_": "mine.stripes"}, "nowhere")
    assert (len(actual.train), len(actual.val), actual.test) == (18, 2, None)
    with pytest.raises(UserError, match="data=digits: its Source has no test set"):
        evaluate(check(composed("data=digits")), actual, tmp_path)


def test_what_numpy_stores_of_a_data_set_fits_into_a_checkpoint(tmp_path: Path) -> None:
    images, names = np.random.default_rng(0).random((9, 12, 12)), np.array(["cat", "dog"])
    spec = Spec(np.int64(1), 12, tuple(np.unique(names)), (images.mean(),), (images.std(),))  # type: ignore[arg-type]
    saved = {"state_dict": {}, "pytorch-lightning_version": "2", "spec": asdict(spec)}
    writer = AtomicCheckpointIO()
    writer.save_checkpoint(saved, tmp_path / "last.ckpt")
    writer.teardown()
    assert load(tmp_path / "last.ckpt")["spec"] == asdict(spec)
    assert (spec.classes, spec.mean) == (("cat", "dog"), (images.mean(),))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("synthetic", {"val_fraction": 1.0}, "data.val_fraction=1.0: must be less than 1"),
        ("synthetic", {"val_fraction": -0.1}, "data.val_fraction=-0.1"),
        ("synthetic", {"val_fraction": 0.9999}, "leaves no image for training"),
        ("synthetic", {"augment": {"crop": 28}}, "less than the image size, 28"),
        ("synthetic", {"augment": {"crop": -1}}, "data.augment.crop=-1"),
        ("synthetic", {"augment": {"flop": True}}, "data.augment.flop: there is no such key"),
        ("synthetic", {"augment": "crop"}, "data.augment=crop"),
        ("synthetic", {"samples": "many"}, "data.samples=many"),
        ("synthetic", {"num_classes": 1}, "data.num_classes=1"),
        ("synthetic", {"sampels": 4}, "did you mean samples"),
        ("synthetic", {"transforms": {"test": []}}, "data.transforms.test: there is no such key"),
        ("synthetic", {"transforms": "ta"}, "data/transforms=ta, with a slash; known: none, rand_augment"),
        ("synthetic", {"mix": "mixin"}, "data.mix=mixin: must be 'mixup' or 'cutmix'"),
        ("synthetic", {"mix_alpha": 0.2}, "data.mix_alpha=0.2 has no effect without data.mix"),
        (
            "synthetic",
            {"mix": "mixup", "mix_alpha": 1e-50},
            "data.mix_alpha=1e-50 is too small for a beta distr",
        ),
        ("synthetic", {"sampling": "even"}, "data.sampling=even: must be 'balanced'"),
        ("image_folder", {"channels": 2}, "data.channels=2: must be 1 (grey) or 3 (RGB)"),
        ("image_folder", {"skip_broken": "no"}, "data.skip_broken=no: must be true or false"),
        ("image_folder", {"mean": ["a", "b", "c"]}, "mean=['a', 'b', 'c']"),
        ("image_folder", {"mean": [0.5]}, "data.mean=[0.5]: must be 3 numbers, one per channel"),
        ("image_folder", {"std": 0}, "data.std=0: must be 3 numbers"),
        ("image_folder", {"std": [0.2, 0.2, 0.0]}, "data.std=[0.2, 0.2, 0.0]: must be greater than 0"),
    ],
)
def test_options_out_of_range_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    line = refusal_of(open_data, config(name, **changes), "nowhere")
    assert message in line, line


def test_options_are_checked_also_where_distributions_do_not_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import of torch.compile switches the checks of torch's distributions off, for the whole process."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", False)
    line = refusal_of(open_data, config("synthetic", mix="mixup", mix_alpha=1e-50), "nowhere")
    assert "data.mix_alpha=1e-50 is too small" in line


class Pictures(list[Any]):
    """A map-style data set whose images are Pillow's, as torchvision's are without a transform."""

    def __init__(self) -> None:
        super().__init__([(Image.new("L", (4, 4)), 0), (Image.new("L", (4, 4)), 1)] * 4)


def of_pictures() -> Source:
    return Source(Pictures(), None, Spec(1, 4, ("a", "b")))


def of_nothing(data_dir: str) -> Source:
    return Source(arrays(0), None, Spec(1, 4, ("a", "b")))


def of_classes(data_dir: str, classes: Sequence[str]) -> Source:
    return Source(arrays(8), arrays(2), Spec(1, 4, tuple(classes)))


def of_list(data_dir: str, classes: list) -> Source:  # as users write it
    return of_classes(data_dir, classes)


def of_none(data_dir: str, classes: Optional[List[str]] = None) -> Source:  # noqa: UP006, UP045  likewise
    return of_classes(data_dir, classes or ())


@pytest.mark.parametrize("opener", [of_classes, of_list, of_none])
def test_a_text_is_no_list_of_its_letters(opener: Any) -> None:
    target = {"name": "mine", "_target_": f"{__name__}.{opener.__name__}"}
    line = refusal_of(open_data, {**target, "classes": "cat"}, "nowhere")
    assert line == "data.classes=cat: must be a list: use data.classes=[cat]"
    assert open_data({**target, "classes": ["cat", "dog"]}, "nowhere").spec.classes == ("cat", "dog")


def of_pair(data_dir: str) -> Any:
    return arrays(8), arrays(2)


def test_a_pair_of_data_sets_lacks_its_description() -> None:
    line = refusal_of(open_data, {"_target_": f"{__name__}.of_pair"}, "nowhere")
    assert line.endswith("(lockstep docs own-data): return Source(train, test, Spec(channels, image_size, classes))")


def test_an_opener_that_finds_nothing_is_named_and_not_the_share_for_validation() -> None:
    line = refusal_of(open_data, {"name": "mine", "_target_": f"{__name__}.of_nothing"}, "nowhere")
    assert line == (
        f"data=mine: {__name__}.of_nothing has returned no training samples, with data_dir=nowhere: it needs at least "
        "one"
    )


def test_what_is_no_source_and_what_is_no_item_is_reported_in_a_line() -> None:
    line = refusal_of(open_data, {"_target_": f"{__name__}.Pictures"}, "nowhere")
    assert "lockstep docs own-data" in line
    assert "train = Pictures(...); test = Pictures(...); return Source(train, test, Spec(" in line
    with pytest.raises(
        UserError,
        match=r"returned a Fraction: it must return a lockstep\.Source or a LightningDataModule \(lockstep docs own",
    ):
        open_data({"_target_": "fractions.Fraction"}, "nowhere")
    pictures = open_data({"_target_": f"{__name__}.of_pictures"}, "nowhere")
    line = refusal_of(fetch, pictures.train, np.arange(2))
    assert "an item of Pictures is (PIL.Image, int): must be (image, label), the image a uint8" in line


def test_sizes_and_class_counts() -> None:
    """For the start-up lines; the classes' counts only where the data set tells its labels without making a sample."""
    actual = open_data(config("synthetic", samples=30, num_classes=3, val_fraction=0.1), "nowhere")
    assert actual.sizes == {"train": 27, "val": 3, "test": 6}
    counts = actual.class_counts()
    assert counts is not None
    assert (sum(counts.values()), list(counts)) == (27, ["0", "1", "2"])
    assert counts == dict(zip("012", np.bincount([int(label) for _, label in actual.train]).tolist(), strict=True))
    unknown = open_data({"_target_": f"{__name__}.of_pictures"}, "nowhere")
    assert (unknown.sizes, unknown.class_counts()) == ({"train": 7, "val": 1, "test": None}, None)
