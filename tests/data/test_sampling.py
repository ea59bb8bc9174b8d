"""Labels and weights of any data set: balanced and weighted sampling, a pure function of seed, epoch and step."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from small_data import arrays, layout, refusal_of
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from lockstep.arithmetic.order import DataOrder
from lockstep.data import Source, Spec
from lockstep.data.build import open_data
from lockstep.data.datasets import labels_of, read_labels, weights_of
from lockstep.job.training import first_batch

LABELS = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
IMAGES = torch.arange(100, dtype=torch.uint8)[:, None, None, None].expand(100, 1, 4, 4).contiguous()
ON = layout(1, 8, 4)


def tensors() -> Any:
    return TensorDataset(IMAGES, LABELS)


class Read(Dataset[Any]):
    """A data set that has nothing but its items."""

    seconds = 0.0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return IMAGES[index], LABELS[index]


class Renamed(Read):
    """Its items have other labels than its attribute, as with torchvision's target_transform."""

    targets = (2 - LABELS).tolist()


CURRENT: list[Source] = []  # what `source` returns


def source() -> Source:
    return CURRENT[-1]


def opened(train: Any, weights: Any = None, **changes: Any) -> Any:
    CURRENT[:] = [Source(train, None, Spec(1, 4, ("a", "b", "c")), sample_weights=weights)]
    return open_data({"_target_": f"{__name__}.source", "val_fraction": 0.0, **changes}, "nowhere")


def taken(splits: Any, epoch: int = 0, on: Any = ON) -> Any:
    return splits.order(on, 3).encoded_ids(epoch) % len(splits.train)


# --- labels -----------------------------------------------------------------------------------------------------------

HALVES: Any = (np.arange(0, 100, 2), np.arange(1, 100, 2))
KINDS: dict[str, Callable[[], Any]] = {
    "tensors": tensors,
    "random_split": lambda: random_split(tensors(), [80, 20], torch.Generator().manual_seed(0))[0],
    "subset of a subset": lambda: Subset(Subset(tensors(), range(100)[::-1]), list(range(90))),
    "concatenated": lambda: ConcatDataset([Subset(tensors(), HALVES[0]), ConcatDataset([tensors(), Read()])]),
    "only items": Read,
    "a part of only items": lambda: Subset(Read(), range(5, 100)),
    "a list": lambda: [(image, int(label)) for image, label in zip(IMAGES, LABELS, strict=True)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_data_set_with_labels_can_be_balanced(kind: str) -> None:
    dataset = KINDS[kind]()
    actual = opened(dataset, sampling="balanced")
    expected = [int(actual.train[index][1]) for index in range(len(actual.train))]
    assert actual.train_labels().tolist() == expected
    counts = np.bincount(np.array(expected)[taken(actual)])
    assert counts.max() - counts.min() <= 1
    validation_part = opened(dataset, sampling="balanced", val_fraction=0.25)
    counts = np.bincount(validation_part.train_labels()[taken(validation_part)])
    assert counts.max() - counts.min() <= 1


def test_an_attribute_that_is_no_list_of_labels_is_passed_over() -> None:
    named = tensors()
    named.labels, named.targets = ["a", "b", "c"], LABELS.tolist()
    assert np.asarray(labels_of(named)).tolist() == LABELS.tolist()
    named.targets = [[1], [1, 2]]
    assert np.asarray(labels_of(named)).tolist() == LABELS.tolist()


def test_labels_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    floats: Any = TensorDataset(IMAGES, LABELS.float())
    line = refusal_of(opened, floats, sampling="balanced")
    assert "the labels of a TensorDataset are unknown: give it an attribute labels or targets with one whole" in line
    line = refusal_of(opened, Renamed(), sampling="balanced")
    assert line.startswith("data: sample 0 has the label 0, and the data set's attribute labels or targets has 2 there")
    monkeypatch.setattr("lockstep.data.datasets.READ_AT_ONCE", 2)
    monkeypatch.setattr("lockstep.data.datasets.READING_SECONDS", 2.0)
    assert len(read_labels(Read())) == 100, "the control"
    monkeypatch.setattr(Read, "seconds", 0.1)
    assert "the labels of a Read are unknown: give it an attribute" in refusal_of(opened, Read(), sampling="balanced")


# --- weights ----------------------------------------------------------------------------------------------------------


def test_an_epoch_is_drawn_by_weight() -> None:
    weights = np.array([0.0, 1, 3, 0, 6] * 2000)
    order = DataOrder(10_000, layout(1, 8, 4), 3, weights=weights)
    assert order.encoded_ids(0).shape == (10_000,)
    assert len(set(order.encoded_ids(0).tolist())) == 10_000, "no sample is taken twice with the same number"
    ids = order.encoded_ids(0) % 10_000
    shares = np.bincount(ids % 5, minlength=5) / 10_000
    np.testing.assert_allclose(shares, [0, 0.1, 0.3, 0, 0.6], atol=0.02)
    assert shares[[0, 3]].tolist() == [0, 0], "a weight of 0 is never drawn"
    repeats = order.encoded_ids(0) // 10_000
    assert repeats.max() >= 2
    for index in np.flatnonzero(repeats == 2)[:5]:
        assert np.count_nonzero(ids[:index] == ids[index]) == 2
    assert not np.array_equal(ids, order.encoded_ids(1) % 10_000)
    # the size of weights does not matter, and a step is the same on any layout and after any other step
    other = DataOrder(10_000, layout(2, 16, 8), 3, weights=weights * 1e300)
    assert np.array_equal(other.step(4, 7), np.concatenate([order.step(4, 14), order.step(4, 15)]))
    assert np.array_equal(np.concatenate(other.pieces(4, 7)) % 10_000, other.step(4, 7))


def test_weights_come_from_the_source_the_data_set_or_what_is_inside_it() -> None:
    weights = (np.arange(100) % 7).astype(np.float32)
    dataset, inside = tensors(), tensors()
    dataset.sample_weights = torch.from_numpy(weights)
    inside.sample_weights = weights.tolist()
    part: Any = np.arange(10, 90)
    for train, expected in (
        (dataset, weights),
        (Subset(inside, part), weights[part]),
        (ConcatDataset([inside, Subset(dataset, part)]), np.concatenate([weights, weights[part]])),
    ):
        actual = opened(train)
        assert actual.weights.tolist() == expected.tolist()
        assert (expected[taken(actual)] > 0).all()
        assert "drawn by sample_weights" in actual.about
        assert actual.weights.dtype == np.float64
    weighted = opened(tensors(), weights)
    assert weighted.weights.tolist() == weights.tolist()
    for split in ({"val_fraction": 0.3}, {"folds": 3, "fold": 1}):
        actual = opened(tensors(), weights, **split)
        assert actual.weights.tolist() == weights[actual.train.indices].tolist()
        assert (actual.weights[taken(actual)] > 0).all()
    plain = opened(tensors())
    assert (plain.weights, plain.about) == (None, "")
    assert weights_of(arrays(3)) is None


def test_other_weights_are_other_data() -> None:
    weights = np.arange(100.0)
    prints = [opened(tensors(), each).fingerprint for each in (None, weights, weights.copy(), weights[::-1])]
    assert prints[1] == prints[2]
    assert len(set(prints)) == 3


def test_overfitting_keeps_the_first_batch_of_weighted_samples() -> None:
    actual = opened(tensors(), (LABELS == 2).float())
    first = first_batch(actual, ON, 3)
    assert (first.weights, len(first.train)) == (None, 8)
    assert all(int(first.train[index][1]) == 2 for index in range(8))
    assert sorted(taken(first)) == list(range(8))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(99), "data: sample_weights: there are 99: must be 100, one for each sample"),
        (np.ones((100, 1)), r"data: sample_weights: must be numbers [100], one for each sample, not float64 [100, 1]"),
        ("uniform", "data: sample_weights: must be numbers [100], one for each sample, not str"),
        (np.r_[np.ones(99), -1], "data: sample_weights: sample 99 has -1: must be finite, and 0 or more"),
        (np.r_[np.nan, np.ones(99)], "data: sample_weights: sample 0 has nan: must be finite, and 0 or more"),
        (np.full(100, np.inf), "data: sample_weights: sample 0 has inf: must be finite, and 0 or more"),
        (np.zeros(100), "data: sample_weights: all samples have the weight 0: some must have more"),
    ],
)
def test_weights_that_are_refused(weights: Any, message: str) -> None:
    assert refusal_of(opened, tensors(), weights) == message


def test_weights_and_balanced_classes_are_refused_together() -> None:
    line = refusal_of(opened, tensors(), np.ones(100), sampling="balanced")
    assert line == (
        "data.sampling=balanced and the sample_weights of the data both decide which samples are drawn: leave one of "
        "them out"
    )
    half: Any = tensors()
    half.sample_weights = np.ones(100)
    line = refusal_of(opened, ConcatDataset([half, tensors()]))
    assert line == "data: only some data sets of a ConcatDataset have sample_weights: give all of them some"


# --- a LightningDataModule --------------------------------------------------------------------------------------------


class Theirs(LightningDataModule):
    """A data module with the sampler `kind` in its training loader."""

    num_classes = 3

    def __init__(self, kind: str = "", collate: bool = False, custom: bool = False) -> None:
        super().__init__()
        self.kind, self.collate = kind, collate
        self.data, self.validation = random_split(tensors(), [80, 20], torch.Generator().manual_seed(0))
        if custom:
            self.sample_weights = torch.arange(80.0)

    def sampler(self, name: str, dataset: Any) -> Any:
        y = torch.stack([dataset[index][1] for index in range(len(dataset))])
        weights: Any = (1.0 / torch.bincount(y).float())[y]
        made: dict[str, Callable[[], Any]] = {
            "": lambda: None,
            "weighted": lambda: WeightedRandomSampler(weights, len(weights)),
            "classes": lambda: WeightedRandomSampler(weights[:3], len(weights)),
            "fewer": lambda: WeightedRandomSampler(weights, 40),
            "once": lambda: WeightedRandomSampler(weights, len(weights), replacement=False),
            "fewer once": lambda: WeightedRandomSampler(weights, 40, replacement=False),
            "subset": lambda: SubsetRandomSampler(range(40)),
            "repeating": lambda: RandomSampler(dataset, replacement=True),
        }
        return made[name]()

    def train_dataloader(self) -> Any:
        collate = (lambda samples: default_collate(samples)) if self.collate else None  # noqa: PLW0108  not torch's own
        kind = "" if self.kind == "in validation" else self.kind
        return DataLoader(self.data, batch_size=4, sampler=self.sampler(kind, self.data), collate_fn=collate)

    def val_dataloader(self) -> Any:
        sampler = self.sampler("weighted", self.validation) if self.kind == "in validation" else None
        return DataLoader(self.validation, batch_size=4, sampler=sampler)


def theirs(**options: Any) -> Any:
    return open_data({"_target_": f"{__name__}.Theirs", **options}, "nowhere")


@pytest.mark.parametrize("collate", [False, True])
def test_a_weighted_random_sampler_gives_its_weights(collate: bool) -> None:
    actual = theirs(kind="weighted", collate=collate)
    labels = np.array([int(actual.train[index][1]) for index in range(80)])
    np.testing.assert_allclose(actual.weights, (1 / np.bincount(labels))[labels], rtol=1e-6)
    counts = sum(np.bincount(labels[taken(actual, epoch)], minlength=3) for epoch in range(20))
    np.testing.assert_allclose(counts / 1600, 1 / 3, atol=0.05)
    assert theirs(collate=collate).weights is None
    balanced = theirs(collate=collate, sampling="balanced")
    assert np.ptp(np.bincount(labels[taken(balanced)])) <= 1


def test_a_data_module_gives_weights() -> None:
    assert theirs(custom=True).weights.tolist() == list(range(80))
    sampler = theirs(custom=True, kind="weighted").weights
    assert sampler.max() < 1, "those by which its loader draws"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("classes", "the WeightedRandomSampler of train_dataloader of Theirs: there are 3: must be 80, one for each"),
        ("fewer", "with num_samples=40: must be 80, the training samples, which an epoch counts; for longer or"),
        ("once", "has a WeightedRandomSampler that draws each sample once: use shuffle=True for each sample once, or"),
        ("fewer once", "has a WeightedRandomSampler that draws without replacement: use shuffle=True"),
        ("subset", "has a SubsetRandomSampler: leave it out, and use torch.utils.data.Subset(dataset, indices)"),
        ("repeating", "has a RandomSampler: leave it out, since an epoch has each sample once (or use data.sampling="),
        (
            "in validation",
            "val_dataloader of Theirs has a WeightedRandomSampler: leave it out, since an evaluation",
        ),
    ],
)
def test_samplers_that_are_refused(kind: str, message: str) -> None:
    assert message in refusal_of(theirs, kind=kind)
