"""`lockstep.Trainer`: an IterableDataset gives each layout the samples that Lightning's Trainer reads on one device."""

import itertools
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from small_data import refusal_of
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info
from trainer.small import QUIET, SAMPLES, Seen, loader, samples, trainer

import lockstep
from lockstep.data import iterables
from lockstep.errors import UserError
from lockstep.launch.environment import environment

ALL = samples()
SIZE = 24


class Plain(IterableDataset[Any]):
    """Yields the samples in order."""

    def __iter__(self) -> Any:
        return iter([ALL[index] for index in range(SAMPLES)])


class Sized(Plain):
    def __len__(self) -> int:
        return SAMPLES


class Shuffled(Plain):
    """Shuffles all samples by torch's global generator, and then in a buffer by one of its own."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def __iter__(self) -> Any:
        buffer: list[Any] = []
        for index in torch.randperm(SAMPLES).tolist():
            buffer.append(ALL[index])
            if len(buffer) == 20:
                yield buffer.pop(self.random.randrange(20))
        yield from buffer


class ByEpoch(Plain):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        yield from (ALL[index] for index in np.random.default_rng(self.epoch).permutation(SAMPLES).tolist())


class Divides(Plain):
    """Divides itself by loader process, as torch's documentation shows."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        step, first = (info.num_workers, info.id) if info else (1, 0)
        return (ALL[index] for index in range(first, SAMPLES, step))


class Endless(Plain):
    def __iter__(self) -> Any:
        return (ALL[index % SAMPLES] for index in itertools.count())


def collate(items: list[Any]) -> Any:
    return torch.utils.data.default_collate(items)


STREAMS: dict[str, Any] = {
    "plain": (Plain, {}, {}),
    "sized": (Sized, {}, {}),
    "chained": (lambda: ChainDataset([Plain(), Plain()]), {}, {}),
    "shuffled": (Shuffled, {}, {}),
    "by epoch": (ByEpoch, {}, {}),
    "drop_last": (Plain, {"drop_last": True}, {}),
    "a collate_fn": (Plain, {"collate_fn": collate}, {}),
    "accumulated": (Shuffled, {"batch_size": 12}, {"accumulate_grad_batches": 4, "pieces": None}),
    "limited": (Endless, {}, {"limit_train_batches": 4}),
    "without an end": (Endless, {}, {"max_steps": 12, "max_epochs": -1}),
}


def fitted(folder: Path, name: str, ours: bool = True, ckpt_path: Any = None, **changes: Any) -> tuple[Any, Seen]:
    make, of_loader, options = STREAMS[name]
    pl.seed_everything(0, verbose=False)
    module = Seen()
    train = DataLoader(make(), **{"batch_size": SIZE, **of_loader})
    if ours:
        made: Any = trainer(folder, num_sanity_val_steps=0, **{"exact": True, "pieces": 4, **options, **changes})
    else:
        options = {key: value for key, value in options.items() if key != "pieces"}
        made = pl.Trainer(default_root_dir=folder, num_sanity_val_steps=0, **{**QUIET, **options})
    made.fit(module, train, DataLoader(Plain(), 50), ckpt_path=ckpt_path)
    return made, module


def hashed(*args: Any, **options: Any) -> str:
    return lockstep.weights_sha256(fitted(*args, **options)[1].state_dict())


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_gives_each_layout_what_one_device_reads(tmp_path: Path, name: str) -> None:
    made, module = fitted(tmp_path / "one", name)
    one = lockstep.weights_sha256(module.state_dict())
    theirs, expected = fitted(tmp_path / "theirs", name, ours=False)
    assert made.global_step == theirs.global_step
    assert module.evaluated[: len(expected.evaluated)] == expected.evaluated
    if name == "shuffled":
        assert sorted(module.trained[0]) == sorted(module.trained[1]) == list(range(SAMPLES))
        assert module.trained[0] != module.trained[1]
    elif name != "accumulated":
        assert module.trained == (expected.trained if name != "by epoch" else [expected.trained[0], module.trained[1]])
        assert name != "by epoch" or module.trained[0] != module.trained[1]
    if name == "plain":
        for first, second in zip(module.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(first, second)
    assert hashed(tmp_path / "dp", name, strategy="dp", devices=2) == one
    assert hashed(tmp_path / "three", name, strategy="dp", devices=3) == one
    folder, steps = tmp_path / "cut", 2 if name == "accumulated" else 7
    assert hashed(folder, name, max_steps=steps) != one
    assert hashed(folder, name, ckpt_path="last", strategy="dp", devices=2) == one
    assert hashed(tmp_path / "seed", name, seed=1) == one or name in ("shuffled", "accumulated")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "name", ["shuffled", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("plain", "without an end"))]
)
def test_a_stream_gives_ranks_what_one_device_reads(tmp_path: Path, name: str) -> None:
    one = hashed(tmp_path / "one", name)
    assert lockstep.launch(lambda: hashed(tmp_path / "two", name), devices=2) == one


@pytest.mark.usefixtures("processes")
def test_a_stream_has_one_loader_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STREAMS, "divides", (Divides, {"num_workers": 2}, {}))
    assert hashed(tmp_path / "two", "divides") == hashed(tmp_path / "one", "plain")


@pytest.mark.usefixtures("processes")
def test_ranks_evaluate_each_sample_of_a_stream_once(tmp_path: Path) -> None:
    def evaluate(devices: int) -> Any:
        made, results = trainer(tmp_path / str(devices), limit_test_batches=3), []
        pl.seed_everything(0, verbose=False)
        module = Seen()
        for method, data in (("validate", Plain()), ("validate", Shuffled()), ("test", Endless())):
            results += getattr(made, method)(module, DataLoader(data, 25), verbose=False)
        return [sorted(each.items()) for each in results], sum(map(len, made.predict(module, DataLoader(Plain(), 25))))

    one, predicted = evaluate(1)
    two, of_rank = lockstep.launch(evaluate, 2, devices=2)
    assert [[name for name, _ in each] for each in one] == [[name for name, _ in each] for each in two]
    for first, second in zip(itertools.chain(*one), itertools.chain(*two), strict=True):
        assert first[1] == pytest.approx(second[1], rel=1e-6)
    assert predicted == SAMPLES
    assert of_rank == 75  # three of the six batches


class OfRank(Plain):
    """Divides itself by rank."""

    def __iter__(self) -> Any:
        return (ALL[index] for index in range(environment().rank, SAMPLES, environment().world_size))


class Halves(Plain):
    """Has the first or second half."""

    def __iter__(self) -> Any:
        half = SAMPLES // environment().world_size
        return (ALL[index] for index in range(environment().rank * half, (environment().rank + 1) * half))


class Shorter(Plain):
    """Is shorter on another rank."""

    def __iter__(self) -> Any:
        return (ALL[index] for index in range(SAMPLES - environment().rank))


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", [OfRank, Halves, Shorter])
def test_a_stream_that_is_divided_by_rank_is_refused(tmp_path: Path, kind: Any) -> None:
    for part in ("train", "val"):
        data = DataLoader(kind(), SIZE)
        loaders = (data,) if part == "train" else (loader(), data)
        with pytest.raises(UserError, match=r"the ranks have different data sets: each must have all samples.*by rank"):
            lockstep.launch(lambda: trainer(tmp_path, pieces=4).fit(Seen(), *loaders), devices=2)  # noqa: B023
    trainer(tmp_path).fit(Seen(), DataLoader(kind(), SIZE))  # control


class Unseeded(Plain):
    def __iter__(self) -> Any:
        return (ALL[index] for index in np.random.default_rng().permutation(SAMPLES).tolist())


class Counts(Plain):
    epoch = 0

    def __iter__(self) -> Any:
        self.epoch += 1
        return (ALL[index] for index in np.random.default_rng(self.epoch).permutation(SAMPLES).tolist())


class CountsInside(Plain):
    """Has a stream that changes, and knows its length."""

    def __init__(self) -> None:
        self.inner = Counts()

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        return iter(self.inner)


class Opened(Plain):
    def __init__(self) -> None:
        self.rows = (ALL[index] for index in range(SAMPLES))


class Wrong(Plain):
    def __len__(self) -> int:
        return SAMPLES + 20


class Grows(ByEpoch):
    def __iter__(self) -> Any:
        return iter([ALL[index] for index in range(SAMPLES - 60 * self.epoch)])


class Empty(Plain):
    def __iter__(self) -> Any:
        return iter([])


def opens(worker: int) -> None: ...


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (lambda: DataLoader(Unseeded(), SIZE), "gives other samples when it is read again"),
        (lambda: DataLoader(Counts(), SIZE), "changes its epoch while it is read"),
        (lambda: DataLoader(CountsInside(), SIZE), "changes its inner.epoch while it is read"),
        (lambda: DataLoader(Opened(), SIZE), "can't be copied (cannot pickle 'generator' object)"),
        (lambda: DataLoader(Wrong(), SIZE), "has 132 samples in epoch 0, and 152 in epoch 0 or by its __len__"),
        (lambda: DataLoader(Grows(), SIZE), "has 72 samples in epoch 1, and 132 in epoch 0"),
        (lambda: DataLoader(Endless(), SIZE), "has 1,000 samples or more, or no end: give it a __len__"),
        (lambda: DataLoader(Empty(), SIZE), "is empty"),
        (lambda: DataLoader(Plain(), batch_size=None), "has a batch_sampler or no batch_size"),
        (lambda: DataLoader(Plain(), SIZE, num_workers=1, worker_init_fn=opens), "has a worker_init_fn for an Iter"),
    ],
)
def test_a_stream_that_does_not_follow_from_the_epoch_is_refused(
    tmp_path: Path, made: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iterables, "MOST", 1000)
    assert line in refusal_of(trainer(tmp_path).fit, Seen(), made())


class Others(Plain):
    def __iter__(self) -> Any:
        return ((x + 1, y) for x, y in super().__iter__())


def test_a_run_continues_with_the_same_stream_only(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=4).fit(Seen(), DataLoader(Plain(), SIZE))
    with pytest.raises(UserError, match="was trained on other data of the same size"):
        trainer(tmp_path).fit(Seen(), DataLoader(Others(), SIZE), ckpt_path="last")
    with pytest.raises(UserError, match="drop_last=True, but"):
        trainer(tmp_path).fit(Seen(), DataLoader(Plain(), SIZE, drop_last=True), ckpt_path="last")
    trainer(tmp_path, max_steps=9).fit(Seen(), DataLoader(Plain(), SIZE), ckpt_path="last")


def test_a_line_names_what_a_stream_costs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = trainer(tmp_path)
    with caplog.at_level("INFO", "lightning.pytorch"):
        made.fit(Seen(), DataLoader(Plain(), SIZE))
    lines = [each for each in caplog.messages if "IterableDataset" in each]
    assert len(lines) == 1
    assert "every process reads as a whole" in lines[0]
