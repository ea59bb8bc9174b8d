"""Shards with a window: what the ranks load, what a data set learns of the shards that come, and what is refused."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from data_orders import borders
from small_data import config, layout, module, refusal_of, splits
from torch.utils.data import DataLoader, IterableDataset, Subset

import lockstep.data.build
from lockstep.arithmetic.layout import Assignment, Layout
from lockstep.arithmetic.streams import ShardNeed, StreamOrder
from lockstep.data import Source, Spec
from lockstep.data.augment import Augment
from lockstep.data.build import open_data
from lockstep.data.loaders import ChunkDataset, StepDataset
from lockstep.data.streams import reads_ahead
from lockstep.data.transforms import transformed
from lockstep.job.training import first_batch

SIZES = [17, 30, 5, 22, 40, 9, 31, 12]
SPEC = Spec(1, 6, ("a", "b"))


class Shards:
    """Samples that are their own numbers. It takes note of the shards that are announced, and that are read."""

    uses_random_numbers = False
    read_ahead = 4

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        self.shard_borders: Any = borders([*sizes])
        self.samples = sum(sizes)
        self.announced: list[tuple[int, list[ShardNeed]]] = []
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read.append(int(np.searchsorted(self.shard_borders, index, side="right")) - 1)
        return torch.full((1, 6, 6), index % 200, dtype=torch.uint8), index % 2

    def will_need(self, step: int, needs: Sequence[ShardNeed]) -> None:
        self.announced.append((step, [*needs]))


def order_on(on: Layout, sizes: Sequence[int] = SIZES, window: int = 2, seed: int = 5) -> StreamOrder:
    return StreamOrder(sum(sizes), on, seed, shard_borders=borders([*sizes]), window=window)


def loaded(order: StreamOrder, rank: int, steps: range, moving: Assignment | None = None) -> tuple[Shards, list[int]]:
    """Return the data set of a rank that has loaded some steps, and their samples."""
    dataset, samples = Shards(), []
    steps_of = StepDataset(dataset, order, rank, Augment(), moving or Assignment(order.layout))
    for step in steps:
        before = len(dataset.read)
        for micro_batch in steps_of.__getitems__(order.position(step)).micro_batches:
            samples += micro_batch.ids.tolist()
        listed = {need.shard for need in dataset.announced[-1][1] if need.first_step <= step <= need.last_step}
        assert set(dataset.read[before:]) <= listed, "a shard is read that was not announced"
    return dataset, samples


class Stream(IterableDataset[int]):
    """The shards of a rank in a row, through a shuffle buffer: the usual form of a stream."""

    def __init__(self, rank: int, ranks: int, skipped: int) -> None:
        self.rank, self.ranks, self.skipped = rank, ranks, skipped

    def __iter__(self) -> Iterator[int]:
        return islice(self.shuffled(), self.skipped, None)

    def shuffled(self) -> Iterator[int]:
        rng, buffer, at = np.random.default_rng(self.rank), [], borders(SIZES)
        for shard in range(self.rank, len(SIZES), self.ranks):
            for sample in range(at[shard], at[shard + 1]):
                buffer.append(sample)
                if len(buffer) == 20:
                    yield buffer.pop(rng.integers(20))
        yield from buffer


def test_a_run_that_goes_on_with_other_ranks_reads_each_sample_once() -> None:
    """Two ranks up to step 7, then three. The control has a shuffle buffer in each rank, and skips what was read."""
    seen: list[int] = []
    for devices, steps in ((2, range(7)), (3, range(7, 14))):
        order = order_on(layout(devices, batch_size=12, pieces=6))
        assert order.steps_per_epoch == 14
        for rank in range(devices):
            seen += loaded(order, rank, steps)[1]
    assert sorted(seen) == list(range(sum(SIZES)))

    read: list[int] = []
    for ranks, skipped, most in ((2, 0, 7), (3, 7 * 12 // 3, None)):
        for rank in range(ranks):
            batches = DataLoader(Stream(rank, ranks, skipped), batch_size=12 // ranks)
            read += [sample for batch in islice(batches, most) for sample in batch.tolist()]
    times = Counter(read)
    assert len(times) < sum(SIZES)  # some are lost
    assert max(times.values()) > 1  # others come twice


def test_a_list_of_shards_comes_when_a_window_begins_and_not_at_each_step() -> None:
    order = order_on(layout(2, batch_size=4, pieces=2), window=2)
    dataset, _ = loaded(order, 1, range(order.steps_per_epoch + 3))
    assert 2 < len(dataset.announced) < 12
    for step, needs in dataset.announced:
        assert len(needs) >= dataset.read_ahead
        assert needs[0].first_step == step


def test_the_new_owner_of_a_piece_learns_of_its_shards() -> None:
    """The assignment moves a piece to rank 0 at step 4: its shards are announced there, and not before."""
    on = layout(2, batch_size=8, pieces=4)
    later = replace(on, shares=(3.0, 1.0))

    class Moving(Assignment):
        def layout_at(self, step: int) -> Layout:
            return self.layout if step < 4 else later

    order = order_on(on, window=1)
    dataset, _ = loaded(order, 0, range(3, 6), Moving(on))
    (_, before), (step, after), *_ = dataset.announced
    of_moved_piece = {need.shard for need in order.shards_ahead(0, 4, [2], 0)[0]}
    assert step == 4
    assert of_moved_piece <= {need.shard for need in after}
    assert not of_moved_piece <= {need.shard for need in before}


class Strict(Shards):
    """Shards of which only those can be read that were announced to this process."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample = super().__getitem__(index)
        assert self.read[-1] in {need.shard for need in self.announced[-1][1]}
        return sample


@pytest.mark.usefixtures("processes")
def test_loader_processes_load_the_same_samples() -> None:
    order_of_processes = []
    for workers in (0, 2):
        data = replace(splits(Strict(), evaluated=Shards()), window=2, shard_borders=borders(SIZES))
        made = module(data, layout(batch_size=12, pieces=4), workers=workers)
        made.trainer.max_steps, made.trainer.max_epochs = -1, 1  # type: ignore[union-attr,misc]
        batches = [[each.ids.tolist() for each in batch.micro_batches] for batch in made.train_dataloader()]
        assert sorted(sample for batch in batches for piece in batch for sample in piece) == list(range(sum(SIZES)))
        order_of_processes.append(batches)
    assert order_of_processes[0] == order_of_processes[1]


def test_an_evaluation_announces_its_shards_in_order() -> None:
    dataset, chunks = Shards([10, 4, 30, 6]), [(0, 8), (8, 16), (16, 24), (24, 32), (32, 40)]
    checked = ChunkDataset(dataset, chunks=chunks)
    for start, stop in chunks:
        checked.__getitems__(range(start, stop))
    assert [step for step, _ in dataset.announced] == [0, 1]  # no other shard begins later, until 44
    assert dataset.announced[0][1] == [ShardNeed(0, 0, 1), ShardNeed(1, 1, 1), ShardNeed(2, 1, 4)]
    ChunkDataset(dataset).__getitems__(range(8))  # of no chunk: read, and not announced
    assert len(dataset.announced) == 2


def test_a_run_announces_nothing_after_its_last_step() -> None:
    data = replace(splits(Shards(), evaluated=Shards()), window=1, shard_borders=borders(SIZES))
    for limits, stop in (((-1, 2), 28), ((9, 2), 9), ((-1, None), None), ((40, 2), 28)):
        made = module(data, layout(batch_size=12, pieces=4))
        made.trainer.max_steps, made.trainer.max_epochs = limits  # type: ignore[union-attr,misc]
        assert made._steps().stop_step == stop


def test_a_data_set_is_reached_through_transforms_and_not_through_a_part_of_it() -> None:
    dataset = Shards()
    assert reads_ahead(transformed(dataset, [torch.nn.Identity()], "data.transforms.train")) is dataset
    assert reads_ahead(Subset(dataset, [0, 1])) is None  # type: ignore[arg-type]
    assert reads_ahead([1, 2]) is None


def test_overfitting_one_batch_reads_the_first_step() -> None:
    on = layout(batch_size=12, pieces=4)
    data = replace(splits(Shards()), window=2, shard_borders=borders(SIZES))
    first = first_batch(data, on, 3)
    assert [*first.train.indices] == data.order(on, 3).step(0, 0).tolist()
    assert sorted(first.order(on, 3).step(1, 0).tolist()) == list(range(12))


# --- opening ----------------------------------------------------------------------------------------------------------


class Unreadable(Shards):
    """Shards with labels that must not be read at the start of a run."""

    @property
    def labels(self) -> Any:
        pytest.fail("the labels of all samples are read")


def opened(monkeypatch: pytest.MonkeyPatch, source: Source, **options: Any) -> Any:
    monkeypatch.setattr(lockstep.data.build, "_open_source", lambda *arguments, **offers: source)
    return open_data(config("shards") | options, "somewhere")


def source(train: Any = None, window: Any = 2, val: Any = None, **changes: Any) -> Source:
    return Source(Shards() if train is None else train, None, SPEC, val or Shards([3, 4]), window=window, **changes)


def test_no_label_of_the_training_set_is_read_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    data = opened(monkeypatch, source(Unreadable()))
    order = data.order(layout(batch_size=12, pieces=4), 1)
    assert (order.window, order.shard_borders.tolist()) == (2, borders(SIZES).tolist())
    assert data.class_counts() is None
    assert data.about == "each piece of a step reads 2 shards at a time"


def test_the_fingerprint_depends_on_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprints = {opened(monkeypatch, source(window=window)).fingerprint for window in (1, 2, None)}
    assert len(fingerprints) == 3


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"window": 0}, {}, "data.window=0: must be a whole number of shards of at least 1, or null"),
        ({"window": True}, {}, "data.window=True: must be a whole number of shards of at least 1, or null"),
        ({"window": 1.5}, {}, "data.window=1.5: must be a whole number of shards of at least 1, or null"),
        (
            {},
            {"sampling": "balanced"},
            "data.window=2: data.sampling=balanced draws from all shards at once: leave one of the two out",
        ),
        (
            {"sample_weights": np.ones(sum(SIZES))},
            {},
            "data.window=2: the data has sample_weights, which draw from all shards at once: leave one of the two out",
        ),
        (
            {},
            {"folds": 2, "fold": 0},
            "data.window=2: data.folds=2 takes images out of all shards: leave one of the two out",
        ),
        (
            {"train": list(range(3))},
            {},
            "data.window=2: the training set, a list, has no shard_borders: leave it out",
        ),
    ],
)
def test_what_needs_all_shards_at_once_is_refused(
    changes: dict[str, Any], options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal_of(opened, monkeypatch, source(**changes), **options) == message


def test_a_share_of_all_shards_for_validation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without_val = Source(Shards(), None, SPEC, window=2)
    assert refusal_of(opened, monkeypatch, without_val, val_fraction=0.1) == (
        "data.window=2: data.val_fraction=0.1 would take images out of all shards: make shards for a part val, or use "
        "data.val_fraction=0"
    )
    assert opened(monkeypatch, without_val, val_fraction=0.0).val is None


@pytest.mark.parametrize("wrong", [[0, 5], [1, 166], [0, 90, 80, 166], [0.0, 166.0], [[0, 166]], [166], "no"])
def test_borders_that_are_none_are_refused(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Shards()
    train.shard_borders = wrong
    assert refusal_of(opened, monkeypatch, source(train)) == (
        "data.window=2: the shard_borders of the training set must be whole numbers that rise from 0 to 166, its "
        "samples"
    )
