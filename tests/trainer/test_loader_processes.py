"""`lockstep.Trainer`: samplers and loader processes on several ranks."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler, get_worker_info
from trainer.small import BATCH, Net, Seen, fit, loader, samples
from trainer.test_loaders import Counts, drawn

import lockstep
from lockstep.errors import UserError
from lockstep.launch.environment import environment

pytestmark = pytest.mark.usefixtures("processes")


def test_ranks_share_the_order_of_a_sampler(tmp_path: Path) -> None:
    one, _ = drawn(tmp_path, "a sampler with a state")
    counts = loader(batch_size=12, shuffle=None, sampler=Counts(samples()), num_workers=1)
    assert lockstep.launch(lambda: fit(tmp_path, counts, kind=Seen, exact=True, pieces=2), devices=2) == one


class OfRank(DistributedSampler[Any]):
    """Is derived from torch's, and so gives each rank a part."""


class Unseeded(Sampler[int]):
    def __init__(self) -> None:
        self.order = np.random.default_rng(list(os.urandom(8))).permutation(len(samples()))

    def __iter__(self) -> Any:
        return iter(self.order.tolist())


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"sampler": OfRank(samples())},
        lambda: {"sampler": Unseeded()},
        lambda: {"sampler": RandomSampler(samples(), generator=torch.Generator().manual_seed(environment().rank))},
        lambda: {"sampler": None, "batch_size": 12 + 12 * environment().rank},
    ],
)
def test_unlike_orders_of_the_ranks_are_refused(tmp_path: Path, make: Any) -> None:
    with pytest.raises(UserError, match="the ranks have samplers or batches that differ: each must give the order of"):
        lockstep.launch(lambda: fit(tmp_path, loader(shuffle=None, **make())), devices=2)


class Opens(Dataset[Any]):
    """Is opened in each loader process, and is another one in each epoch."""

    factor, epoch = 0.0, -1

    def __len__(self) -> int:
        return len(samples())

    def __getitem__(self, index: int) -> Any:
        x, y = samples()[index]
        return x * self.factor + self.epoch, y

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def opens(worker: int) -> None:
    get_worker_info().dataset.factor = 2.0  # type: ignore[union-attr]


class Asserts(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        expected = sorted((samples().tensors[0][:, 0] * 2.0 + self.current_epoch).tolist())
        assert set(batch[0][:, 0].tolist()) <= set(expected)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_processes_are_set_up_by_the_users_function_and_get_the_epoch(tmp_path: Path, workers: int) -> None:
    data = Opens()
    data.factor = 0.0 if workers else 2.0
    made = DataLoader(data, BATCH, True, num_workers=workers, worker_init_fn=opens if workers else None)
    fit(tmp_path, made, kind=Asserts, max_epochs=3)
