"""What a step's batch holds, what is random in it, and that evaluation sees every sample once."""

import multiprocessing
import random
import sys
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_data import arrays, layout, module, splits, step_batches
from torch.utils.data import DataLoader, Subset, TensorDataset

from lockstep.arithmetic.layout import Layout
from lockstep.data import StepData
from lockstep.data.datasets import fetch
from lockstep.data.loaders import chunks_of_rank
from lockstep.data.user_loaders import read_loader
from lockstep.errors import UserError
from lockstep.step.batch import StepBatch

# --- fetching ---------------------------------------------------------------------------------------------------------


def test_a_gather_is_the_same_as_sample_by_sample() -> None:
    dataset, ids = arrays(50), np.array([3, 49, 0, 3])
    images, labels = fetch(Subset(dataset, np.arange(50)[::-1].copy()), ids)  # type: ignore[arg-type]
    for row, index in enumerate(49 - ids):
        assert torch.equal(images[row], dataset[index][0])
        assert labels[row] == dataset[index][1]


class Noisy(torch.utils.data.Dataset[Any]):
    """Somebody's dataset, with random transforms that draw from every global generator."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, float]:
        noise = random.random() + np.random.rand()  # noqa: NPY002
        return torch.rand(2) + index, index, noise


def same(one: list[StepBatch], other: list[StepBatch]) -> bool:
    def tensors(augment_samples: list[StepBatch]) -> list[torch.Tensor]:
        return [
            t
            for step_batch in augment_samples
            for micro_batch in step_batch.micro_batches
            for t in (*micro_batch.batch, torch.from_numpy(micro_batch.ids))
        ]

    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


class Listed(Noisy):
    """One that gives a list, as torch's Subset does to each class derived from it."""

    def __getitems__(self, ids: Any) -> list[Any]:
        return [self[int(index)] for index in ids]


class Batched(Noisy):
    def __getitems__(self, ids: Any) -> Any:
        return torch.rand(len(ids)), torch.as_tensor(ids)


@pytest.mark.parametrize("kind", [Noisy, Listed, Batched])
def test_what_a_users_transforms_draw_follows_from_seed_epoch_and_sample(kind: type[Noisy]) -> None:
    def augment_samples(ids: list[int], seed: int = 1, epoch: int = 2) -> list[torch.Tensor]:
        random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
        return fetch(kind(), np.array(ids), seed, epoch)

    first, again = augment_samples([4, 9, 2]), augment_samples([4, 9, 2])
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], augment_samples([4, 9, 2], epoch=3)[0])
    assert not torch.equal(first[0], augment_samples([4, 9, 2], seed=3)[0])
    if kind is not Batched:  # wherever the sample lies
        assert all(torch.equal(part[1], other[0]) for part, other in zip(first, augment_samples([9, 1]), strict=True))


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("dataset", [arrays(30), Noisy(), Listed(), Subset(Noisy(), list(range(5, 30)))])
def test_worker_processes_change_no_bit(dataset: Any) -> None:
    on = layout(batch_size=8, pieces=2)
    torch.manual_seed(0)
    inline = step_batches(module(splits(dataset), on))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert same(inline, step_batches(module(splits(dataset), on, workers=2)))
    assert torch.equal(torch.get_rng_state(), state), "a loader must not move the global random state"
    assert not same(inline, step_batches(module(splits(dataset), on, seed=4)))


def test_an_iterator_of_torch_draws_from_no_global_generator() -> None:
    """It is used with loader processes and with pinned memory."""
    data = module(splits(arrays(30), evaluated=arrays(30)), layout(batch_size=8))
    state = torch.get_rng_state()
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        assert list(DataLoader.__iter__(loader))
        assert torch.equal(torch.get_rng_state(), state)
    numbers: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(3)), batch_size=2)
    assert list(numbers)  # the control
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("workers", [0, 1])
def test_transforms_in_a_validation_set_are_the_same_in_each_evaluation(workers: int) -> None:
    def seen(rank: int, on: Layout, workers: int = 0) -> list[torch.Tensor]:
        data = module(splits(arrays(9), evaluated=Subset(Noisy(), list(range(5, 30)))), on, rank, workers=workers)
        state = torch.get_rng_state()
        augment_samples = [torch.cat([part, i[:, None], noise[:, None]], 1) for part, i, noise in data.val_dataloader()]
        assert torch.equal(torch.get_rng_state(), state), "what comes after must not depend on it"
        return augment_samples

    whole = torch.cat(seen(0, layout(1, 12), workers))
    assert torch.equal(whole, torch.cat(seen(0, layout(1, 4))))
    torch.manual_seed(1)
    assert torch.equal(whole, torch.cat([part for rank in (0, 1) for part in seen(rank, layout(2, 12))]))


def test_a_plain_dataset_passes_unchanged() -> None:
    x, y = torch.randn(20, 3), torch.arange(20)
    data = module(splits(TensorDataset(x, y), evaluated=TensorDataset(x, y)), layout(batch_size=6))
    micro_batch = step_batches(data)[0].micro_batches[0]
    got_x, got_y = data.prepare(micro_batch)
    assert torch.equal(got_x, x[micro_batch.ids])
    assert torch.equal(got_y, y[micro_batch.ids])
    assert [len(batch[0]) for batch in data.val_dataloader()] == [12, 8]


# --- evaluation -------------------------------------------------------------------------------------------------------


@given(samples=st.integers(1, 5000), devices=st.integers(1, 9), pieces=st.integers(1, 20), size=st.integers(1, 600))
def test_evaluation_covers_every_sample_once(samples: int, devices: int, pieces: int, size: int) -> None:
    pieces = max(pieces, devices)
    on, alone = layout(devices, pieces * size, pieces), layout(1, pieces * size, pieces)
    augment_samples = [chunk for rank in range(on.world_size) for chunk in chunks_of_rank(samples, on, rank)]
    assert augment_samples == chunks_of_rank(samples, alone, 0)
    assert [i for chunk in augment_samples for i in range(*chunk)] == list(range(samples))


@pytest.mark.parametrize(
    ("trains", "batch_size", "pieces", "size"),
    [(True, 64, 1, 128), (True, 8, 4, 4), (False, 8, 1, 8), (False, 2, 4, 1)],
)
def test_evaluation_takes_no_more_samples_at_once_than_fit(
    trains: bool, batch_size: int, pieces: int, size: int
) -> None:
    on = replace(layout(), batch_size=batch_size, pieces=pieces)
    data = StepData(splits(arrays(9), evaluated=arrays(700)), on, 0, num_workers=0, trains=trains)
    batches = [len(y) for _, y in data.test_dataloader()]
    assert sum(batches) == 700
    assert max(batches) == size


def test_a_limit_of_batches_counts_those_of_all_ranks() -> None:
    """A batch is one of the step, here of 8 samples in chunks; or one of the loader, which is a chunk."""
    uneven = [3, 12, 25]  # of a batch sampler
    limits: list[tuple[Any, int | float, int]] = [(None, 1, 8), (None, 3, 24), (None, 0.5, 16), (None, 9, 40)]
    limits += [(8, 1, 8), (12, 1, 12), (12, 2, 24), (uneven, 2, 15), (uneven, 0.5, 3)]
    for ranks in (1, 2, 4):
        data: Any = module(splits(arrays(9), evaluated=arrays(40)), layout(ranks, 8, 2 * ranks))
        whole = data.evaluation_shares("val")
        assert sum(share.samples for share in whole) == 40
        for batch_size, limit, samples in limits:
            read = splits(arrays(9), evaluated=arrays(40))
            if batch_size is not None:
                cuts = pairwise([0, *accumulate(batch_size)]) if batch_size is uneven else ()
                how = {"batch_sampler": [range(*cut) for cut in cuts]} if cuts else {"batch_size": batch_size}
                loaded: Any = read_loader(DataLoader(arrays(40), **how), "", trains=False, seed=0)  # type: ignore[arg-type]
                read = replace(read, loaders={"val": loaded})
            limited: Any = module(read, layout(ranks, 8, 2 * ranks))
            limited.trainer.limit_val_batches = limit
            shares = limited.evaluation_shares("val")
            assert sum(share.samples for share in shares) == samples
            assert limited.num_local_samples("val") == shares[0].samples
            sizes = [len(y) for _, y in limited.loader_of_loop("val_dataloader")]
            assert sum(sizes) == (shares[0].samples or 1), "a rank without a sample has one, whose result it drops"
            assert limited.samples_of_batch("val", 0) == sizes[0]
        assert data.evaluation_shares("test") == whole
        data.trainer.predicting, data.trainer.limit_predict_batches = True, 1
        shares = data.evaluation_shares("test")
        assert sum(share.samples for share in shares) == 8, "predictions have a limit of their own"
    data.trainer.limit_predict_batches = 0.1
    with pytest.raises(UserError, match=r"limit_predict_batches=0.1 of 5 batches is less than one: give at least 0.2"):
        data.evaluation_shares("test")


class Quick(Noisy):
    wants_workers = False


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are not forked")
@pytest.mark.parametrize(
    ("dataset", "wanted"),
    [
        (Noisy(), True),
        (Subset(Noisy(), [1, 2]), True),
        (Quick(), False),
        (TensorDataset(torch.zeros(3, 1), torch.zeros(3)), False),
        ([(torch.zeros(1), 0)] * 3, False),
        (arrays(3), False),
    ],
)
def test_who_gets_loader_processes_unasked(dataset: Any, wanted: bool) -> None:
    data = module(splits(dataset, evaluated=dataset), layout(batch_size=2), workers=None)
    assert bool(data.train_dataloader().num_workers) is bool(data.val_dataloader().num_workers) is wanted


@pytest.mark.usefixtures("processes")
def test_loader_processes_are_forked_whatever_python_prefers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14 prefers a server; to `set_parent_death_signal`, its children are orphans."""
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    multiprocessing.set_start_method("forkserver")
    data = module(splits(arrays(20)), layout(), workers=1)
    assert [len(step_batch.micro_batches) for step_batch in data.train_dataloader()] == [1, 1]
