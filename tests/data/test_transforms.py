"""Transforms of a config, mixed pieces and balanced sampling: on any layout, and refused where they can't be."""

import csv
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Program, Run
from PIL import Image
from small_data import arrays, config, layout, module, refusal_of, splits, step_batches
from torch.utils.data import TensorDataset
from torchvision.transforms import v2

from lockstep.arithmetic.order import DataOrder
from lockstep.data import Source, Spec
from lockstep.data.augment import Augment
from lockstep.data.build import open_data
from lockstep.data.datasets import fetch, labels_of
from lockstep.data.transforms import transformed
from lockstep.job.training import first_batch

V2 = "torchvision.transforms.v2"
RESIZE = {"_target_": f"{V2}.Resize", "size": [16, 16]}
FLOAT = {"_target_": f"{V2}.ConvertImageDtype"}
NORMALIZE = {"_target_": f"{V2}.Normalize", "mean": [0.25], "std": [0.5]}

# --- whole runs -------------------------------------------------------------------------------------------------------


def test_what_is_predicted_passes_the_transforms_of_evaluation(project: Path, tmp_path: Path) -> None:
    """Dark and bright images, inverted in evaluation alone, are taken for each other: in the run, and afterwards."""
    (project / "conf" / "data" / "transforms").mkdir()
    (project / "conf" / "data" / "transforms" / "inverted.yaml").write_text(
        f"train: null\neval:\n  - _target_: {V2}.RandomInvert\n    p: 1.0\n"
    )
    for part, name, number in itertools.product(("train", "test"), ("dark", "bright"), range(12)):
        file = tmp_path / "images" / part / name / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (12, 12), number if name == "dark" else 255 - number).save(file)

    def program(name: str, *overrides: str) -> Run:
        return Program(tmp_path / name, f"src/{name}.py", project)(*overrides)

    data = (
        "data=image_folder",
        f"data_dir={tmp_path / 'images'}",
        "data.image_size=12",
        "data.channels=1",
        "data.augment=null",
    )
    short = ("batch_size=8", "max_epochs=4", "logger=none", "data/transforms=inverted", "num_workers=0")
    trained = program("train", *data, *short)
    assert trained.summary["metrics"]["train/loss"] < 0.2
    assert trained.summary["metrics"]["test/correct"] == 0
    checkpoint = f"checkpoint={trained.folder}"
    assert program("evaluate", checkpoint).summary["metrics"]["test/correct"] == 0
    table = program("predict", checkpoint, f"images={tmp_path / 'images' / 'test'}").folder / "predictions.csv"
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 24
    assert all(row["file"].partition("/")[0] != row["predicted"] for row in rows)


# --- transforms -------------------------------------------------------------------------------------------------------


def synthetic(**changes: Any) -> Any:
    return open_data(config("synthetic", samples=40, image_size=12, num_classes=3, **changes), "data")


def test_what_is_for_validation_passes_the_transforms_of_evaluation() -> None:
    erased = {"_target_": f"{V2}.RandomErasing", "p": 1.0, "scale": [0.9, 0.9], "ratio": [1.0, 1.0]}
    plain, actual = synthetic(), synthetic(transforms={"train": [erased], "eval": None})
    for part in ("val", "test"):
        wanted, seen = (fetch(getattr(each, part), np.arange(4))[0] for each in (plain, actual))
        assert torch.equal(wanted, seen)
    trained, before = (fetch(each.train, np.arange(4))[0] for each in (actual, plain))
    assert (trained == 0).float().mean() > 0.8
    assert (before == 0).float().mean() < 0.1
    assert actual.fingerprint == plain.fingerprint, "the data are the same"
    inverted = synthetic(transforms={"eval": [{"_target_": f"{V2}.RandomInvert", "p": 1.0}]})
    for part in ("val", "test"):
        wanted, seen = (fetch(getattr(each, part), np.arange(4))[0] for each in (plain, inverted))
        assert torch.equal(seen, 255 - wanted)
    assert torch.equal(fetch(inverted.train, np.arange(4))[0], before)


def test_the_spec_is_that_of_the_images_that_come_out() -> None:
    rgb = {"_target_": f"{V2}.Grayscale", "num_output_channels": 3}
    spec = synthetic(transforms={"train": [rgb, RESIZE], "eval": [rgb, RESIZE]}).spec
    assert (spec.channels, spec.image_size, len(spec.mean), len(spec.std)) == (3, 16, 3, 3)
    floats = synthetic(transforms={"train": [FLOAT, NORMALIZE], "eval": [FLOAT, NORMALIZE]})
    assert (floats.spec.mean, floats.spec.std) == ((0.25,), (0.5,))
    assert fetch(floats.train, np.arange(2))[0].dtype == torch.float32
    later = synthetic(transforms={"train": [{"_target_": f"{V2}.RandomCrop", "size": "later:image_size"}]})
    assert later.spec.image_size == 12


def of(name: str, **options: Any) -> dict[str, Any]:
    return {"_target_": f"{V2}.{name}", **options}


FLAT = of("Resize", size=[12, 16])
TRANSFORMS: list[tuple[list[Any], list[Any], str]] = [
    ([of("RandomFlip")], [], f"train[0]._target_={V2}.RandomFlip: {V2} has no RandomFlip"),
    ([RESIZE, of("RandomErasing", p=2.0)], [], "train[1]: `p` should be a floating point value in the interval"),
    ([of("RandAugment", opps=2)], [], "train[0].opps: RandAugment takes no such option"),
    ([RESIZE, NORMALIZE], [], "train: Normalize: Input tensor should be a float tensor"),
    ([RESIZE], [], "eval gives images of 1 x 12 x 12: they must be 1 x 16 x 16"),
    ([FLAT], [FLAT], "gives images of 1 x 12 x 16: they must be square"),
    ([of("RandomResize", min_size=8, max_size=30)], [], "they must have one size; use RandomResizedCrop"),
    ([FLOAT, NORMALIZE], [FLOAT], "data.transforms.eval differ in Normalize: use the same mean"),
    (
        [FLOAT, NORMALIZE],
        [],
        "train gives float images and data.transforms.eval uint8 images: give both the same ConvertImageDtype",
    ),
    (["trivial"], [], "train=['trivial']: must be a valid dictionary"),
]


@pytest.mark.parametrize(("train", "evaluation", "message"), TRANSFORMS)
def test_transforms_that_are_refused(train: list[Any], evaluation: list[Any], message: str) -> None:
    line = refusal_of(synthetic, transforms={"train": train, "eval": evaluation})
    assert line.startswith("data.transforms")
    assert message in line, line


# --- a data set of one's own ------------------------------------------------------------------------------------------


@dataclass
class Noisy:
    """Its training images are random, its labels several numbers, or known when asked for one by one."""

    noise: int
    several: bool = False

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        label = torch.tensor([index, 1]) if self.several else index % 2
        return torch.full((1, 8, 8), 10 * self.noise * float(torch.rand(())) + index), label


def noisy(several: bool = False, validation_part: int | None = None) -> Source:
    clean = None if validation_part is None else Noisy(0) if validation_part else TensorDataset(torch.zeros(3, 1))
    return Source(Noisy(1, several), None, Spec(1, 8, ("a", "b")), val_candidates=clean)


def opened(**changes: Any) -> Any:
    return open_data({"_target_": f"{__name__}.noisy", "val_fraction": 0.2, **changes}, "data")


def test_a_custom_source_describes_how_validation_samples_look() -> None:
    actual = opened(validation_part=1)
    images, labels = fetch(actual.val, np.arange(4))
    assert images[:, 0, 0, 0].tolist() == actual.val.indices.tolist()
    assert labels.tolist() == [index % 2 for index in actual.val.indices]
    assert not set(actual.val.indices) & set(actual.train.indices)
    control = opened()
    assert fetch(control.val, np.arange(4))[0][:, 0, 0, 0].tolist() != control.val.indices.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation_part": 0}, "the Source's val_candidates has 3 samples: it must have 20, as its train"),
        ({"sampling": "balanced", "several": True}, "the labels of a Noisy are unknown"),
        (
            {"mix": "cutmix", "several": True},
            "data.mix=cutmix: the data set must give images [C, H, W] with one label each",
        ),
    ],
)
def test_a_custom_source_that_is_refused(changes: dict[str, Any], message: str) -> None:
    line = refusal_of(opened, **changes)
    assert message in line


# --- balanced sampling ------------------------------------------------------------------------------------------------


def test_a_balanced_epoch() -> None:
    labels = np.repeat([4, 0, 9], [70, 25, 5])[np.random.default_rng(0).permutation(100)]
    order = DataOrder(100, layout(1, 8, 4), 3, labels)
    for epoch in range(3):
        taken = np.concatenate([piece for step in range(order.steps_per_epoch) for piece in order.pieces(epoch, step)])
        assert len(taken) == len(set(taken.tolist())) == 100, "no sample is taken twice with the same number"
        ids = order.encoded_ids(epoch) % 100
        assert np.array_equal(ids, taken % 100)
        steps = [order.step(epoch, step) for step in range(order.steps_per_epoch)]
        assert np.array_equal(ids, np.concatenate(steps)), "of samples, whose labels may be asked for"
        counts = np.bincount(labels[ids], minlength=10)
        assert sorted(counts[[0, 4, 9]].tolist()) == [33, 33, 34]
        times = np.bincount(ids, minlength=100)
        for label, often in ((4, {0, 1}), (0, {1, 2}), (9, {6, 7})):
            assert set(times[labels == label].tolist()) <= often
    first, second = (set((order.encoded_ids(epoch) % 100).tolist()) for epoch in (0, 1))
    assert len(first ^ second) > 20, "of a large class, every epoch takes others"
    halves = labels[order.encoded_ids(0) % 100].reshape(2, 50)
    assert all(8 <= count <= 26 for half in halves for count in np.bincount(half)[[0, 4, 9]])


@pytest.mark.parametrize(("balanced", "counts"), [(True, [12, 12]), (False, [23, 1])])
def test_overfitting_takes_the_batch_that_the_run_begins_with(balanced: bool, counts: list[int]) -> None:
    dataset = arrays(24)
    dataset.labels = torch.tensor([0] * 23 + [1])
    on = layout(1, 24, 1)
    actual = first_batch(replace(splits(dataset), labels=dataset.labels.numpy() if balanced else None), on, 3)
    for epoch in range(2):
        labels = np.asarray(labels_of(actual.train))
        assert np.bincount(labels[actual.order(on, 3).encoded_ids(epoch) % 24]).tolist() == counts


def test_a_repeated_sample_is_augmented_anew() -> None:
    dataset = arrays(40, size=6)
    dataset.labels = torch.tensor([0] * 39 + [1])
    actual: Any = module(splits(dataset, Augment(crop=2)), layout(1, 40, 1))
    actual.order = DataOrder(40, actual.layout, 3, dataset.labels.numpy())
    (micro_batch,) = step_batches(actual)[0].micro_batches
    repeated = micro_batch.ids == 39
    assert repeated.sum() == 20
    images = actual.prepare(micro_batch)[0][torch.from_numpy(repeated)]
    assert len({image.numpy().tobytes() for image in images}) > 8
    actual.trainer.global_step = 1
    (of_next_epoch,) = step_batches(actual)[0].micro_batches
    used = micro_batch.epochs_and_repeats[repeated], of_next_epoch.epochs_and_repeats[of_next_epoch.ids == 39]
    assert len(np.unique(used)) == 40, "no use has the random numbers of another one"
    erasing = transformed(dataset, [v2.RandomErasing(p=1)], "")
    images = fetch(erasing, micro_batch.ids, 3, micro_batch.epochs_and_repeats)[0][torch.from_numpy(repeated)]
    assert len({image.numpy().tobytes() for image in images}) > 15
    control = fetch(erasing, micro_batch.ids, 3, 0)[0][torch.from_numpy(repeated)]
    assert len({image.numpy().tobytes() for image in control}) == 1


def test_transforms_may_write_into_their_image() -> None:
    def erase(image: Any) -> Any:
        image[:] = 0
        return image

    for images in (np.full((4, 1, 2, 2), 7, np.uint8), torch.full((4, 1, 2, 2), 7, dtype=torch.uint8)):
        pairs = [(image, 0) for image in images]
        assert not transformed(pairs, [erase, torch.as_tensor], "transforms")[1][0].any()
        assert (images == 7).all()


class Summed(list[Any]):
    """Data whose batches are made by its own function."""

    def collate_fn(self, samples: list[Any]) -> Any:
        return torch.stack([image for image, _ in samples]).sum(0), len(samples)


def test_a_data_set_collates_as_before_when_it_has_transforms() -> None:
    pairs = Summed((torch.full((1, 2, 2), value), 0) for value in (1, 2, 4))
    summed, count = fetch(transformed(pairs, [v2.RandomHorizontalFlip()], "transforms"), np.arange(3))
    assert count == 3
    assert (summed == 7).all()
