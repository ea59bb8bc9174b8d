"""`lockstep.Trainer`: what a loader decides of its samples and batches is as with Lightning's on one device."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from small_data import refusal_of
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from trainer.small import BATCH, LAYOUTS, SAMPLES, Net, Seen, fit, loader, samples, trainer

import lockstep
from lockstep.data.user_data import source_of
from lockstep.errors import UserError


class Sizes(Dataset[Any]):
    """Images of which each has another size, so that two of them can't be collated."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return torch.ones(8 + index), index


class Recorded(Net):
    """Records the sizes of evaluation batches."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[Any] = []

    def _record(self, batch: Any, batch_idx: int) -> None:
        self.sizes.append(tuple(batch[0].shape))

    validation_step = test_step = predict_step = _record  # type: ignore[assignment]


def evaluate(folder: Path, stage: str, module: Net, data: Any, **options: Any) -> None:
    """Let a module evaluate a loader, also as the validation of a fit."""
    made = trainer(folder, max_epochs=1, num_sanity_val_steps=0, **options)
    if stage == "fit":
        made.fit(module, loader(), data)
    else:
        getattr(made, stage)(module, data)


STAGES = [("fit", "dp"), ("validate", "one"), ("test", "dp"), ("predict", "dp"), ("predict", "one")]


@pytest.mark.parametrize(("stage", "layout"), STAGES)
def test_the_batches_of_an_evaluation_have_the_loaders_size(tmp_path: Path, stage: str, layout: str) -> None:
    for options in ({}, {"batch_size": BATCH}):
        module = Recorded()
        evaluate(tmp_path, stage, module, DataLoader(samples(), batch_size=50), **LAYOUTS[layout], **options)
        assert [size[0] for size in module.sizes] == [50, 50, 32]
        module = Recorded()
        evaluate(tmp_path, stage, module, DataLoader(Sizes(), batch_size=1), **LAYOUTS[layout], **options)
        assert module.sizes == [(1, 8 + index) for index in range(7)]


class OneClass(RandomSampler):
    """Gives the samples of class 0 only, in random order, as a class filter does."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.chosen = np.flatnonzero(dataset.tensors[1].numpy() == 0)

    def __len__(self) -> int:
        return len(self.chosen)

    def __iter__(self) -> Any:
        return iter(np.random.permutation(self.chosen))  # noqa: NPY002  as users do


class Backwards(SequentialSampler):
    def __iter__(self) -> Any:
        return iter(range(SAMPLES - 1, -1, -1))


class Counts(Sampler[int]):
    """Has a counter and a generator of its own, and wants to be told the epoch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.calls, self.generator, self.epoch = dataset, 0, np.random.default_rng(3), -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Any:
        assert self.epoch == self.calls, "each epoch is drawn once"
        self.calls += 1
        return iter(self.generator.permutation(SAMPLES)[: len(self)].tolist())


class ByClass(Sampler[list[int]]):
    """A batch sampler that gives each batch the same number of samples of each class."""

    def __init__(self, dataset: Any) -> None:
        self.members = [np.flatnonzero(dataset.tensors[1].numpy() == each) for each in range(3)]

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        for _ in range(4):
            yield np.concatenate([np.random.choice(each, 8) for each in self.members]).tolist()  # noqa: NPY002


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# how a loader draws, and the number of samples of an epoch
DRAWS: dict[str, Any] = {
    "a subclass of RandomSampler": (lambda data: {"sampler": OneClass(data)}, None),
    "a subclass of SequentialSampler": (lambda data: {"sampler": Backwards(data)}, SAMPLES),
    "a sampler with a state": (lambda data: {"sampler": Counts(data)}, 60),
    "SubsetRandomSampler": (lambda data: {"sampler": SubsetRandomSampler(range(5, 77))}, 72),
    "fewer by weight": (lambda data: {"sampler": WeightedRandomSampler([1.0] * SAMPLES, 52)}, 52),
    "more by weight": (lambda data: {"sampler": WeightedRandomSampler([1.0] * SAMPLES, 200)}, 200),
    "by weight, each once": (lambda data: {"sampler": WeightedRandomSampler([1.0] * SAMPLES, 52, False)}, 52),
    "with replacement": (lambda data: {"sampler": RandomSampler(data, True, 100)}, 100),
    "a generator": (lambda data: {"shuffle": True, "generator": seeded(5)}, SAMPLES),
    "a distributed one with a seed": (lambda data: {"sampler": DistributedSampler(data, 2, 1, seed=7)}, SAMPLES),
    "a list": (lambda data: {"sampler": [3, 1, 2] * 20}, 60),
    "a batch sampler": (lambda data: {"batch_sampler": ByClass(data)}, 96),
    "torch's batch sampler": (lambda data: {"batch_sampler": BatchSampler(OneClass(data), 10, True)}, None),
}


def drawn(folder: Path, kind: str, ckpt_path: Any = None, **options: Any) -> tuple[str, list[list[int]]]:
    """Fit with a loader that draws in one of the ways of DRAWS. Return the hash and the samples of the epochs."""
    data = samples()
    made = DRAWS[kind][0](data)
    pl.seed_everything(0, verbose=False)
    module = Seen()
    size: dict[str, Any] = {} if "batch_sampler" in made else {"batch_size": 12}
    fitted = trainer(folder, **{"exact": True, "pieces": 2, **options})
    fitted.fit(module, DataLoader(data, **size, **made), ckpt_path=ckpt_path)
    return lockstep.weights_sha256(module.state_dict()), module.trained


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("kind", DRAWS)
def test_the_order_of_an_epoch_is_what_the_sampler_gives(tmp_path: Path, kind: str) -> None:
    one, (first, second) = drawn(tmp_path, kind)
    data, expected = samples(), DRAWS[kind][1]
    classes = data.tensors[1][first].tolist()
    assert len(first) == len(second)
    assert expected in (None, len(first))
    if "subclass of Random" in kind or "torch's" in kind:
        assert set(classes) == {0}
    elif "Sequential" in kind:
        assert first == list(range(SAMPLES))[::-1]
    elif kind == "SubsetRandomSampler":
        assert sorted(first) == list(range(5, 77))
    elif kind == "a list":
        assert first == [3, 1, 2] * 20
    elif kind == "a batch sampler":
        assert all(sorted(classes[at : at + 24]) == [0] * 8 + [1] * 8 + [2] * 8 for at in range(0, 96, 24))
    elif kind == "a generator":
        assert first == list(RandomSampler(data, generator=seeded(5))), "Lightning's order"
    if kind not in ("a subclass of SequentialSampler", "a list"):
        assert first != second
        if kind not in ("a sampler with a state", "a generator", "a distributed one with a seed"):
            assert drawn(tmp_path, kind, seed=1)[1][0] != first
    # in another layout, with loader processes, and from a checkpoint inside the second epoch
    assert drawn(tmp_path, kind, strategy="dp", devices=2) == (one, [first, second])
    folder = tmp_path / "cut"
    steps = -(-len(first) // (24 if kind == "a batch sampler" else 10 if "torch's" in kind else 12))
    drawn(folder, kind, max_steps=steps + 2, max_epochs=-1)
    assert drawn(folder, kind, ckpt_path="last")[0] == one


@pytest.mark.parametrize(("stage", "layout"), STAGES)
def test_an_evaluation_reads_what_its_sampler_gives(tmp_path: Path, stage: str, layout: str) -> None:
    data = samples()

    def batches(**options: Any) -> list[list[int]]:
        evaluate(tmp_path, stage, module := Seen(), DataLoader(data, **options), **LAYOUTS[layout])
        return module.evaluated

    backwards = Backwards(data)
    assert batches(batch_size=50, sampler=backwards)[0] == list(range(SAMPLES - 1, SAMPLES - 51, -1))
    drawn_ids = [each for batch in batches(batch_size=9, sampler=SubsetRandomSampler(range(5, 35))) for each in batch]
    assert sorted(drawn_ids) == list(range(5, 35))
    unlike = [[4, 2], [7, 7, 7], [1]]
    assert batches(batch_sampler=unlike) == unlike
    rest = [32] if stage == "predict" else []  # as Lightning, which predicts each sample
    assert [len(each) for each in batches(batch_size=50, drop_last=True)] == [50, 50, *rest]
    assert [len(each) for each in batches(batch_size=50, sampler=backwards, drop_last=True)] == [50, 50, *rest]


class Changes(pl.Callback):
    """Changes the weights of a sampler, as active learning does."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def on_train_epoch_end(self, *_: Any) -> None:
        self.sampler.weights[0] = 5.0


class Grows(Sampler[int]):
    calls = 0

    def __init__(self, dataset: Any) -> None: ...

    def __iter__(self) -> Any:
        self.calls += 1
        return iter(range(40 + self.calls))


class Holds(Backwards):
    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.net = torch.nn.Linear(1, 1)


class Endless(Sampler[int]):
    def __init__(self, dataset: Any) -> None:
        self.lock = (each for each in [0])


class Names(Backwards):
    def __iter__(self) -> Any:
        return iter(["a"] * SAMPLES)


class UsersIter(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(())


class UsersLength(DataLoader[Any]):
    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (
            lambda data: DataLoader(data, 12, sampler=Grows(data)),
            "has a Grows that gives 42 samples in epoch 1, and 41",
        ),
        (lambda data: DataLoader(data, 12, sampler=Holds(data)), "has a Holds that refers to a Linear: its order must"),
        (lambda data: DataLoader(data, 12, sampler=Endless(data)), "has a Endless that can't be copied"),
        (
            lambda data: DataLoader(data, 12, sampler=Names(data)),
            "has a Names that yields 'a': must be the number of a",
        ),
        (
            lambda data: DataLoader(data, 12, sampler=[500]),
            "has a list that yields 500: must be the number of a sample",
        ),
        (lambda data: DataLoader(data, batch_sampler=[[1], [2, 3], [4]]), "with batches of 1 to 2 samples: all but a"),
        (lambda data: DataLoader(data, batch_size=None), "has a batch_sampler or no batch_size"),
        (
            lambda data: UsersIter(data, 12),
            "returns a UsersIter with its own __iter__, and batches that it makes can't be",
        ),
        (lambda data: UsersLength(data, 12), "returns a UsersLength with its own __len__"),
    ],
)
def test_a_loader_whose_samples_do_not_follow_from_the_epoch_is_refused(tmp_path: Path, made: Any, line: str) -> None:
    methods = ["fit"] if any(each in line for each in ("Grows", "1 to 2")) else ["fit", "validate"]
    for method in methods:
        assert line in refusal_of(getattr(trainer(tmp_path), method), Net(), made(samples()))


def test_a_sampler_that_changes_during_training_is_refused(tmp_path: Path) -> None:
    sampler = WeightedRandomSampler([1.0] * SAMPLES, 60)
    with pytest.raises(UserError, match="whose weights was changed during training"):
        trainer(tmp_path, callbacks=[Changes(sampler)]).fit(Net(), loader(shuffle=None, sampler=sampler))
    trainer(tmp_path).fit(Net(), loader(shuffle=None, sampler=WeightedRandomSampler([1.0] * SAMPLES, 60)))  # control


@pytest.mark.usefixtures("processes")
def test_how_a_loader_moves_its_batches_is_ours(tmp_path: Path) -> None:
    one = fit(tmp_path, loader(), exact=True, pieces=2)
    options: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 3, "timeout": 5}
    more = loader(num_workers=1, multiprocessing_context="spawn", **options)
    assert fit(tmp_path, more, exact=True, pieces=2) == one


@pytest.mark.parametrize(
    "made",
    [
        lambda data: DataLoader(data, 12, sampler=OneClass(data)),
        lambda data: DataLoader(data, 12, True, generator=seeded(5)),
        lambda data: DataLoader(data, batch_sampler=ByClass(data)),
        lambda data: UsersIter(data, 12),
    ],
)
def test_the_template_refuses_what_it_would_not_read(made: Any) -> None:
    """A config's data set has its order by `data.sampling`, and parts that are held out."""

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return made(samples())

    with pytest.raises(UserError, match=r"^data: the train_dataloader of Data (has|returns)"):
        source_of(Data(), 0)
