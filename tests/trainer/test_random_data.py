"""Random numbers and state of data sets, transforms and `collate_fn`: seeded, or named."""

import itertools
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from trainer.small import BATCH, Net, fit, lines_of_lockstep, samples, trainer

import lockstep
from lockstep.errors import StepRefused

GLOBAL = np.random.default_rng()


class Items(Dataset[Any]):
    def __init__(self, transform: Callable[[Any], Any] | None) -> None:
        self.x, self.y = (each.clone() for each in samples().tensors)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return (self.transform(self.x[index]) if self.transform else self.x[index]), self.y[index]


class Draws:
    """Adds a random number, from a generator of its own."""

    def __init__(self, make: Callable[[], Any], draw: Callable[[Any], Any], late: bool = False) -> None:
        self.make, self.draw = make, draw
        self.rng = {"of": None if late else make()}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.rng["of"] is None:
            self.rng["of"] = self.make()
        return x + float(self.draw(self.rng["of"]))


class Shared:
    R = np.random.RandomState()  # as of MONAI

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + float(self.R.rand())


def in_closure() -> Callable[[Any], Any]:
    generator = random.Random()
    return lambda x: x + generator.random()


def torch_generator() -> Draws:
    return Draws(torch.Generator, lambda rng: torch.rand(1, generator=rng))


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: Draws(np.random.default_rng, lambda rng: rng.normal()),
    "RandomState": lambda: Draws(np.random.RandomState, lambda rng: rng.rand()),
    "Random": lambda: Draws(random.Random, lambda rng: rng.random()),
    "torch": torch_generator,
    "late": lambda: Draws(np.random.default_rng, lambda rng: rng.normal(), late=True),
    "class": Shared,
    "closure": in_closure,
    "module": lambda: lambda x: x + GLOBAL.normal(),
    "nested": lambda: torch.nn.Sequential(torch.nn.Identity(), Wrapped([torch_generator()])),
}


class Wrapped(torch.nn.Module):
    def __init__(self, transforms: list[Any]) -> None:
        super().__init__()
        self.transforms = transforms

    def forward(self, x: Any) -> Any:
        for transform in self.transforms:
            x = transform(x)
        return x


def noisy(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return x + 0.5 * torch.randn(x.shape) + np.random.randn() + random.random(), y  # noqa: NPY002


def noise_of_a_generator() -> Callable[[Any], Any]:
    generator = np.random.default_rng()

    def collate(items: list[Any]) -> Any:
        x, y = default_collate(items)
        return x + generator.normal(), y

    return collate


def train(folder: Path, transform: Any, collate: Any = None, workers: int = 0, path: Any = None, **options: Any) -> str:
    def run() -> str:
        for seed in (random.seed, np.random.seed):
            seed()
        data = DataLoader(Items(transform()), BATCH, shuffle=True, num_workers=workers, collate_fn=collate)
        return fit(folder, data, ckpt_path=path, **{"pieces": 4, "exact": True, **options})

    return lockstep.launch(run, devices=options.get("devices", 1)) if workers or "devices" in options else run()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_generator_of_a_transform_is_seeded(tmp_path: Path, name: str) -> None:
    one = train(tmp_path, TRANSFORMS[name], max_steps=2)
    assert train(tmp_path, TRANSFORMS[name], max_steps=2) == one, "though it is another generator"
    assert train(tmp_path, TRANSFORMS[name], max_steps=2, seed=1) != one


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("transform", "collate"), [("late", None), ("numpy", noisy), ("torch", noise_of_a_generator())]
)
def test_loader_processes_ranks_and_a_resume_give_the_same(tmp_path: Path, transform: str, collate: Any) -> None:
    make = TRANSFORMS[transform]
    one = train(tmp_path / "a", make, collate)
    assert train(tmp_path / "b", make, collate, workers=2) == one
    assert train(tmp_path / "c", make, collate, devices=2) == one
    train(tmp_path / "d", make, collate, max_steps=5)
    assert train(tmp_path / "d", make, collate, path="last") == one
    assert train(tmp_path / "e", make) != one or collate is None


class Counts:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + 0.01 * self.calls


class Cycles(Counts):
    def __init__(self) -> None:
        self.values = itertools.cycle([1.0, 2.0, 3.0])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + next(self.values)


def erase(x: torch.Tensor) -> torch.Tensor:
    x[random.randrange(8)] = 0  # of the data set's own tensor
    return x


@pytest.mark.parametrize("transform", [Counts, Cycles, lambda: erase])
def test_what_is_not_seeded_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, transform: Any) -> None:
    line = r"sample \d+ of the training set is another one when it is fetched again: draw from the global generators of"
    with pytest.raises(StepRefused, match="^exact=true: " + line):
        train(tmp_path, transform)
    with caplog.at_level(logging.WARNING, "lockstep"):
        train(tmp_path, transform, exact=False)
    assert "is another one when it is fetched again" in caplog.text
    caplog.clear()
    train(tmp_path, lambda: lambda x: x + random.random(), exact=False)
    assert not lines_of_lockstep(caplog)


def test_what_a_validation_set_counts_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = r"sample \d+ of the validation set is another one when it is fetched again"

    def validates(exact: bool, transform: Any) -> None:
        val = DataLoader(Items(transform), BATCH)
        trainer(tmp_path, exact=exact, pieces=2).fit(Net(), DataLoader(samples(), BATCH), val)

    with pytest.raises(StepRefused, match="^exact=true: " + line):
        validates(True, Counts())
    with caplog.at_level(logging.WARNING, "lockstep"):
        validates(False, Counts())
    assert [text for text in lines_of_lockstep(caplog) if "fetched again" in text] == lines_of_lockstep(caplog)[:1]
    validates(True, lambda x: x + random.random())
