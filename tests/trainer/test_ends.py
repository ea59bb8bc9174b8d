"""Exceptions that Python, Lightning or a loader process take as an end, not as an error: none ends a run in silence."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TIMEOUT, ended
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info
from trainer.small import BATCH, Net, loader, samples, trainer

import lockstep
from lockstep.errors import StepRefused, UserError, WorkerFailed

METHODS = (
    *("training_step", "validation_step", "test_step", "predict_step", "optimizer_step", "lr_scheduler_step"),
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end"),
    *("on_before_zero_grad", "on_before_optimizer_step", "on_after_batch_transfer", "configure_gradient_clipping"),
    "on_test_batch_end",
)


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def module_that_raises(name: str, error: type[BaseException], late: int = 2) -> Any:
    """Return a module whose method `name` raises an exception in a later call, if there are several."""
    original, calls = getattr(Scheduled, name), []

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) > late:
            raise error
        return original(self, *args, **kwargs)

    return type("Raises", (Scheduled,), {name: method})()


class Items(Dataset[Any]):
    """Raises an exception at one sample."""

    def __init__(self, error: type[BaseException] | None) -> None:
        self.samples, self.error = samples(), error

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index == 77 and self.error:
            raise self.error
        return self.samples[index]


@pytest.mark.parametrize(
    ("name", "error"), [*((name, StopIteration) for name in METHODS), ("training_step", GeneratorExit)]
)
def test_of_a_module_none_ends_a_run(tmp_path: Path, name: str, error: type[BaseException]) -> None:
    once = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end", "predict_step")
    module = module_that_raises(name, error, 0 if name in once else 1)
    trains = trainer(tmp_path, exact=True, pieces=2, num_sanity_val_steps=0)

    def use() -> None:
        trains.fit(module, loader(), loader(shuffle=False))
        trains.test(module, loader(shuffle=False))
        trains.predict(module, loader(shuffle=False))

    with pytest.raises((StepRefused, error)) as raised:  # outside of loops, nothing takes it for an end
        use()
    if name != "on_train_start":
        assert raised.match(
            rf"^{error.__name__} was raised at .*test_ends.py:\d+ in method, which ends a loop, so steps"
        )


def collate_that_stops(error: type[BaseException]) -> Callable[[Any], Any]:
    calls: list[int] = []

    def collate(items: Any) -> Any:
        calls.append(len(items))
        if len(calls) > 2:
            raise error
        return default_collate(items)

    return collate


@pytest.mark.parametrize(
    ("place", "error"),
    [
        *((place, StopIteration) for place in ("train", "val", "collate", "test", "predict")),
        *(("train", error) for error in (StopAsyncIteration, GeneratorExit, SystemExit)),
    ],
)
def test_of_a_data_set_none_ends_a_run(tmp_path: Path, place: str, error: type[BaseException]) -> None:
    with pytest.raises(
        StepRefused, match=rf"^{error.__name__} was raised at .*test_ends.py:\d+ in (__getitem__|collate)"
    ):
        evaluates(tmp_path, place, error, 0)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("place", "error"), [("train", SystemExit), ("val", StopIteration), ("train", GeneratorExit)])
def test_of_a_loader_process_none_ends_a_run(tmp_path: Path, place: str, error: type[BaseException]) -> None:
    with pytest.raises(
        UserError, match=rf"^{error.__name__} was raised at .*test_ends.py:\d+ in __getitem__, which ends"
    ):
        lockstep.launch(lambda: evaluates(tmp_path, place, error, 2))


def evaluates(tmp_path: Path, place: str, error: type[BaseException], workers: int) -> None:
    """Fit, test and predict with a data set that raises an exception in one place, with `workers` loader processes."""

    def load(name: str, **options: Any) -> Any:
        return DataLoader(Items(error if name == place else None), BATCH, num_workers=workers, **options)

    collate = {"collate_fn": collate_that_stops(error)} if place == "collate" else {}
    trains = trainer(tmp_path, pieces=2, max_epochs=1)
    trains.fit(Net(), load("train", **collate), load("val"))
    trains.test(dataloaders=load("test"))
    trains.predict(dataloaders=load("predict"))


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("place", ["train", "val", "training_step"])
def test_ranks_do_not_wait_for_one_that_has_stopped(tmp_path: Path, place: str) -> None:
    def run() -> None:
        step = module_that_raises("training_step", StopIteration)
        data: Any = [DataLoader(Items(StopIteration if name == place else None), BATCH) for name in ("train", "val")]
        trainer(tmp_path, devices=2).fit(step if place == "training_step" else Net(), *data)

    with pytest.raises(UserError, match=r"^StopIteration was raised at .*, which ends a loop, so steps or samples"):
        lockstep.launch(run, devices=2, hang_timeout=600)


class Hangs(Items):
    """One loader process of one rank hangs, and ignores SIGTERM, as one that hangs in fork."""

    def __init__(self, pid: Path) -> None:
        super().__init__(None)
        self.pid = pid

    def __getitem__(self, index: int) -> Any:
        if os.environ["RANK"] == "1" and get_worker_info() is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.pid.write_text(str(os.getpid()))
            time.sleep(600)
        return super().__getitem__(index)


@pytest.mark.usefixtures("processes")
def test_a_loader_process_that_hangs_is_named_and_killed(tmp_path: Path) -> None:
    def run() -> None:
        data = DataLoader(Hangs(tmp_path / "pid"), BATCH, num_workers=1)
        trainer(tmp_path, devices=2).fit(Net(), data)

    line = r"^rank 1 did not join the other ranks within 8 s \(hang_timeout\): it was waiting for a loader process"
    with pytest.raises(WorkerFailed, match=line):
        lockstep.launch(run, devices=2, hang_timeout=8)
    deadline = time.monotonic() + TIMEOUT  # a process that was killed still needs a moment to end
    while not ended(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < deadline, "the loader process goes on"
        time.sleep(0.02)


def test_an_epoch_has_its_steps_and_an_evaluation_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.data.loaders import ChunkSampler, StepSampler

    for sampler, line in (
        (StepSampler, "epoch 0 has 3 of 6 steps, though nothing has asked for a stop: the loader must yield all steps"),
        (ChunkSampler, "validate: 2 of 6 batches were evaluated: the loader must yield all"),
    ):
        original = sampler.__iter__

        def shorter(self: Any, original: Any = original) -> Iterator[Any]:
            return iter(list(original(self))[: 3 if isinstance(self, StepSampler) else 2])

        with monkeypatch.context() as patch:
            patch.setattr(sampler, "__iter__", shorter)
            with pytest.raises(StepRefused, match=line):
                trainer(tmp_path).fit(Net(), loader(), loader(shuffle=False))


class Unlabelled(Net):
    """Takes a value of an iterator in each call of `training_step`."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.others, self.seen = make(), []  # type: ignore[var-annotated]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        others = self.others["of"] if isinstance(self.others, dict) else self.others
        self.seen.append(next(others))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter(range(12)),
        lambda: (number for number in range(12)),
        lambda: {"of": iter(range(12))},
        lambda: (int(batch) for batch in DataLoader(range(12), batch_size=1)),  # type: ignore[arg-type]
    ],
)
def test_the_trial_passes_take_nothing_from_iterators(tmp_path: Path, make: Any) -> None:
    module = Unlabelled(make)
    trainer(tmp_path).fit(module, loader())
    assert module.seen == list(range(12))
    with pytest.raises(StepRefused, match=r"exact=true: .* an iterator that the module keeps \((of|others)\), so each"):
        trainer(tmp_path, exact=True).fit(Unlabelled(make), loader())
