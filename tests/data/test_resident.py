"""Sets in memory that are put on the GPU: the same batches, bit for bit; what does not fit is refused.

No GPU is needed: the device is the CPU here, the free memory a number.
"""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from small_data import arrays, layout, module, splits, step_batches
from torch.utils.data import Subset

from lockstep.arithmetic.layout import Layout
from lockstep.data import ArrayDataset, Splits, StepData, loaders
from lockstep.data.augment import Augment
from lockstep.data.datasets import innermost_dataset
from lockstep.data.step_data import place_on_device
from lockstep.errors import UserError

CPU = torch.device("cpu")
PLENTY = 1e9
SIZE = 40 * (6 * 6 + 8)  # bytes of arrays(40) with their labels


class Streamed:
    """A set on disk."""

    wants_workers = True

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((1, 6, 6), index, dtype=torch.uint8), index


class Custom(ArrayDataset):
    """A user's: what it does with its arrays is its own business."""

    def __getitems__(self, ids: Any) -> Any:
        images, labels = super().__getitems__(ids)
        return 255 - images, labels


def data(on: Layout, put: bool, rank: int = 0, workers: int = 0) -> StepData:
    whole = arrays(40)
    train, val = Subset(whole, range(0, 40, 2)), Subset(whole, range(1, 40, 2))  # type: ignore[var-annotated, arg-type]
    opened = Splits(train, val, arrays(9), splits(None).spec, "", Augment(crop=1, flip=True))
    return module(place_on_device(opened, CPU, "auto", PLENTY) if put else opened, on, rank, workers=workers)


def seen(made: StepData) -> list[torch.Tensor]:
    """Return all that training, validation and test get to see."""
    micro_batches = [micro_batch for step_batch in step_batches(made) for micro_batch in step_batch.micro_batches]
    trained = [part for micro_batch in micro_batches for part in made.prepare(micro_batch)]
    evaluated = [*made.val_dataloader(), *made.test_dataloader()]
    return trained + [part for batch in evaluated for part in made.on_after_batch_transfer(batch, 0)]


@pytest.mark.parametrize(("strategy", "devices", "world_size"), [("ddp", 1, 1), ("ddp", 3, 3), ("dp", 3, 1)])
def test_the_batches_are_the_same(strategy: str, devices: int, world_size: int) -> None:
    on = layout(devices, 12, 6, strategy)
    for rank in range(world_size):
        resident, here = seen(data(on, True, rank)), seen(data(on, False, rank))
        assert len(resident) == len(here) > 6
        assert all(torch.equal(a, b) for a, b in zip(resident, here, strict=True))
    wrong = data(on, True)
    subset = innermost_dataset(wrong.splits.train)
    subset.images = subset.images.flip(0)  # the control: it is the moved set that is fetched from
    assert not all(torch.equal(a, b) for a, b in zip(seen(wrong), seen(data(on, False)), strict=True))


@pytest.mark.parametrize("put", [False, True])
def test_a_gpu_gathers_the_samples_of_more_steps_at_once(put: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call starts kernels, and copies ids and numbers of augmentation."""
    assert loaders.FETCH_BYTES_ON_DEVICE == 64 * loaders.FETCH_BYTES
    monkeypatch.setattr(loaders, "FETCH_BYTES", 36 * 12)  # the images of three steps
    monkeypatch.setattr(loaders, "FETCH_BYTES_ON_DEVICE", 36 * 12 * 64)
    fetched = Mock(side_effect=loaders.fetch)
    monkeypatch.setattr(loaders, "fetch", fetched)
    assert len(step_batches(data(layout(batch_size=4), put))) == 5
    assert [len(call.args[1]) for call in fetched.call_args_list] == ([20] if put else [12, 8])


def test_a_set_is_put_on_the_device_once_and_needs_no_loader_process() -> None:
    made = data(layout(), True, workers=2)
    assert innermost_dataset(made.splits.train).resident
    assert innermost_dataset(made.splits.train) is innermost_dataset(made.splits.val)  # two subsets of one set
    assert made.train_dataloader().num_workers == 0
    assert data(layout(), False, workers=2).train_dataloader().num_workers == 2


@pytest.mark.parametrize(
    ("choice", "free", "moved"),
    [
        ("auto", 4 * SIZE, True),
        ("auto", 4 * SIZE - 1, False),  # more than half of the memory
        ("auto", 2 * SIZE - 1, False),
        (True, 2 * SIZE, True),
        (False, PLENTY, False),
    ],
)
def test_how_much_room_it_may_take(choice: Any, free: float, moved: bool) -> None:
    actual = place_on_device(splits(arrays(40), evaluated=arrays(40)), CPU, choice, free)  # val and test are one set
    assert [part.resident for part in (actual.train, actual.val, actual.test)] == [moved] * 3


@pytest.mark.parametrize("train", [Streamed(), Custom(np.zeros((40, 1, 6, 6), np.uint8), np.arange(40))])
def test_what_streams_or_is_a_users_data_set_stays(train: Any) -> None:
    subset = Subset(train, range(30))
    actual = place_on_device(splits(subset), CPU, "auto", PLENTY)
    assert innermost_dataset(actual.train) is train
    assert actual.test.resident
    with pytest.raises(UserError, match=r"speed.resident=true: no data set is in memory.*: use speed.resident=auto"):
        place_on_device(splits(train, evaluated=train), CPU, True, PLENTY)


def test_sets_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"^speed.resident=true: the data sets take 0 MiB, and cpu has 0 MiB free: use speed.resident=false$",
    ):
        place_on_device(splits(arrays(40), evaluated=arrays(40)), CPU, True, 2 * SIZE - 1)


def test_the_hosts_part_of_a_step_is_page_locked_with_resident_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers of the augmentation come from the host, and a GPU copies only from such memory asynchronously."""
    locked: list[torch.Tensor] = []

    def lock(tensor: torch.Tensor) -> torch.Tensor:
        locked.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = data(layout(batch_size=10), put=True)
    step_batch = step_batches(made)[0]
    (micro_batch,) = step_batch.micro_batches
    numbers = micro_batch.augmentation_numbers
    micro_batch.batch = tuple(part.to("meta") for part in micro_batch.batch)  # in place of a GPU
    step_batch.pin_memory()
    assert [each is numbers for each in locked] == [True]
    made.layout = replace(made.layout, accelerator="gpu")
    assert made.train_dataloader().pin_memory
    assert not made.val_dataloader().pin_memory  # all of it is on the GPU
