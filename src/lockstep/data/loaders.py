"""From the order of samples to loaders: which samples a process fetches, and when. Nothing here has a state."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset, get_worker_info

from lockstep.arithmetic.deal import Deal
from lockstep.arithmetic.layout import Layout
from lockstep.arithmetic.order import DataOrder, chunks, cuts
from lockstep.data.augment import Augment
from lockstep.data.datasets import ArrayDataset, Ids, base, fetch
from lockstep.data.on_device import Resident
from lockstep.step.batch import MicroBatch, StepBatch

Chunk = tuple[int, int]  # (start, stop)
Step = tuple[int, int]  # (epoch, step of the epoch)
GATHERED = 1 << 20  # bytes of images that are gathered at once, of a set in memory


class Loader(DataLoader[Any]):
    """torch's DataLoader, but a plain loop without loader processes: its iterator would take 0.1 ms a batch more.

    Attributes:
        checking: whether only the first batch is wanted: it then comes from a loader process of its own, and nothing of
            this loader changes.
    """

    checking: Callable[[], bool] | None = None

    def __iter__(self) -> Any:
        sampler: Any = self.batch_sampler
        if self.checking is not None and self.checking():
            first = Loader(
                self.dataset,
                batch_sampler=list(islice(sampler, 1)),
                num_workers=min(1, self.num_workers),
                collate_fn=self.collate_fn,
                pin_memory=self.pin_memory,
                multiprocessing_context=self.multiprocessing_context,
                generator=torch.Generator().manual_seed(0),
                worker_init_fn=self.worker_init_fn,
            )
            return iter(first)
        if self.num_workers or self.pin_memory:
            return super().__iter__()
        return map(self.dataset.__getitems__, sampler)  # type: ignore[attr-defined]


class StepSampler(Sampler[Any]):
    """Yields the epoch's remaining steps.

    Args:
        steps_taken: tells how many optimizer steps the run has made. It is asked when iteration begins and not before,
            so a resumed run goes on where it stopped; Lightning would start its loader at batch 0.
    """

    def __init__(self, order: DataOrder, steps_taken: Callable[[], int]) -> None:
        self.order = order
        self.steps_taken = steps_taken

    def __len__(self) -> int:
        return self.order.steps_per_epoch

    def __iter__(self) -> Iterator[Step]:
        epoch, start = self.order.position(self.steps_taken())
        return ((epoch, index) for index in range(start, len(self)))


class StepDataset:
    """A training set whose items are what one process computes of an optimizer step.

    Of a set in memory, the samples of several steps are gathered at once: between two steps all caches are cold, and
    getting there takes longer than gathering.
    """

    def __init__(self, dataset: Any, order: DataOrder, rank: int, augment: Augment, deal: Deal | None = None) -> None:
        self.dataset = dataset
        self.order = order
        self.augment = augment
        self.deal = deal or Deal(order.layout)
        self.rank = rank
        self._gathered: dict[Step, StepBatch] = {}
        self._gathered_on: Layout | None = None  # who computes which piece of those

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, at: Step) -> StepBatch:
        loader_process = get_worker_info() is not None  # they may be many, each has its own memory, and nobody waits
        if loader_process or type(base(self.dataset)) not in (ArrayDataset, Resident):
            return self._fetch(self._step_batch(*at))
        layout = self.deal.layout_at(self._number(*at))
        if at not in self._gathered or layout is not self._gathered_on:
            self._gathered, self._gathered_on = self._gather(*at), layout
        return self._gathered.pop(at)

    def fetch_piece(self, step_batch: StepBatch, piece: int, device: int) -> StepBatch:
        """Fetch one piece of a step alone, for a device that need not be its owner."""
        epoch, index = self.order.position(step_batch.step)
        micro_batch = self._micro_batch(epoch, self.order.pieces(epoch, index)[piece], piece, device)
        return self._fetch(replace(step_batch, micro_batches=[micro_batch]))

    def _fetch(self, step_batch: StepBatch) -> StepBatch:
        seed = self.order.seed
        for micro_batch in step_batch.micro_batches:
            micro_batch.batch = fetch(self.dataset, micro_batch.ids, seed, micro_batch.epochs)
            micro_batch.draws = self.augment.draws(seed, micro_batch.epochs, micro_batch.ids)
        return step_batch

    def _gather(self, epoch: int, index: int) -> dict[Step, StepBatch]:
        """The step `index`, and those after it that are gathered with it."""
        order, image = self.order, base(self.dataset).images[0]
        samples = -(-order.layout.batch_size // order.layout.replicas)
        together = max(1, GATHERED // (image.nbytes * samples))
        last = min(index + together, order.steps_per_epoch)
        found = {(epoch, step): self._step_batch(epoch, step) for step in range(index, last)}
        micro_batches = [micro_batch for step_batch in found.values() for micro_batch in step_batch.micro_batches]
        if not micro_batches:
            return found
        sizes = [len(micro_batch.ids) for micro_batch in micro_batches]
        ids = np.concatenate([micro_batch.ids for micro_batch in micro_batches])
        parts = (part.split(sizes) for part in fetch(self.dataset, ids))
        for micro_batch, batch in zip(micro_batches, zip(*parts, strict=True), strict=True):
            micro_batch.batch = batch
        epochs = np.concatenate([micro_batch.epochs for micro_batch in micro_batches])
        draws = self.augment.draws(order.seed, epochs, ids)
        if draws is not None:
            for micro_batch, own in zip(micro_batches, draws.split(sizes), strict=True):
                micro_batch.draws = own
        return found

    def _step_batch(self, epoch: int, index: int) -> StepBatch:
        """Who computes which samples of a step; they are still to be fetched. Pieces without a sample are left out."""
        pieces, step = self.order.pieces(epoch, index), self._number(epoch, index)
        layout = self.deal.layout_at(step)
        nonempty = sum(1 for ids in pieces if len(ids))

        def has_data(micro_batches: list[tuple[int, int]]) -> bool:
            return any(len(pieces[piece]) for _, piece in micro_batches)

        own = [
            self._micro_batch(epoch, pieces[piece], piece, device)
            for device, piece in layout.micro_batches(self.rank)
            if len(pieces[piece])
        ]
        all_ranks_have_data = nonempty == len(pieces) or all(
            has_data(layout.micro_batches(rank)) for rank in range(layout.replicas)
        )
        return StepBatch(own, sum(map(len, pieces)), nonempty, epoch, step, all_ranks_have_data)

    def _number(self, epoch: int, index: int) -> int:
        """The optimizer step since the run began."""
        return epoch * self.order.steps_per_epoch + index

    def _micro_batch(self, epoch: int, taken: Ids, piece: int, device: int) -> MicroBatch:
        repeats, ids = np.divmod(taken, self.order.samples)
        return MicroBatch(ids, device, piece, epoch + (repeats << 32))


class ChunkSampler(Sampler[range]):
    """Yields the sample ids of each chunk. No list, as Lightning's `predict` wraps a sampler, and tells a
    `BasePredictionWriter` what it yields."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self.chunks = chunks

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[range]:
        return (range(*chunk) for chunk in self.chunks)


class ChunkDataset:
    """An evaluation set whose items are batches of neighbouring samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, ids: range) -> Any:
        return fetch(self.dataset, np.arange(ids.start, ids.stop))


def own_chunks(samples: int, layout: Layout, rank: int, trains: bool = True) -> list[Chunk]:
    """The run of neighbouring chunks that a process evaluates; empty where there are fewer chunks than processes.

    Over all processes every sample is in one chunk. A chunk's size is the same on every layout with the same
    `batch_size` and `pieces`, since kernels may round differently for batches of another size. It is a piece's, and in
    a run that trains up to 128 samples where that is more: small chunks only cost time. But not more than two pieces,
    which take about what one does in training (peaks measured: resnet18 half of that, mnist_cnn 1.05 of it).
    """
    piece = max(1, layout.batch_size // layout.pieces)
    size = max(piece, min(2 * piece, 128)) if trains else piece
    parts = chunks(samples, min(-(-samples // layout.pieces), size))
    at = cuts(len(parts), layout.replicas)
    return parts[at[rank] : at[rank + 1]]


def streams(dataset: Any) -> bool:
    """Whether loader processes pay: a class says so by `streams`; else where samples are made one by one, and processes
    are forked, so that they need not find its classes and functions again."""
    found = base(dataset)
    in_memory = hasattr(found, "__getitems__") or isinstance(found, Sequence | TensorDataset)
    return bool(getattr(found, "streams", sys.platform == "linux" and not in_memory))
