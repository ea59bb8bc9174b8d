"""Loaders: they fetch a process's samples of each step. They keep no position between epochs or runs."""

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset, get_worker_info

from lockstep.arithmetic.layout import Assignment, Layout
from lockstep.arithmetic.order import DataOrder, cuts
from lockstep.arithmetic.streams import StreamOrder, shards_of_chunks
from lockstep.data.augment import Augment
from lockstep.data.datasets import ArrayDataset, Ids, fetch, innermost_dataset, set_epoch_of
from lockstep.data.repeats import Repeats
from lockstep.data.seeding import Generators
from lockstep.data.streams import reads_ahead
from lockstep.errors import UserError
from lockstep.launch.environment import environment
from lockstep.launch.signals import set_parent_death_signal
from lockstep.step.batch import MicroBatch, StepBatch

Chunk = tuple[int, int]  # (start, stop)
BatchCheck = Callable[[Any, Any], None]  # gets a collated batch and the ids of its samples
StepPosition = tuple[int, int]  # (epoch, step of the epoch)
# Bytes of images that one call fetches from a data set in memory: those of as many steps as fit, and of at least one.
FETCH_BYTES = 1 << 20  # of a set in the CPU's memory: they stay in its cache
FETCH_BYTES_ON_DEVICE = 64 << 20  # of a set on a GPU: each call starts kernels and copies from the host


class Loader(DataLoader[Any]):
    """torch's DataLoader, but with a plain loop if there are no loader processes, which saves 0.1 ms per batch.

    Attributes:
        sanity_batches: a function that returns the number of batches of Lightning's sanity check while it runs, else 0.
            The check gets them from a separate loader, so that this loader's processes and random state do not change.
    """

    sanity_batches: Callable[[], float] | None = None

    def __iter__(self) -> Any:
        sampler: Any = self.batch_sampler
        if self.sanity_batches is not None and (number := self.sanity_batches()):
            loader_of_first_batches = Loader(
                self.dataset,
                batch_sampler=list(islice(sampler, int(min(number, len(sampler))))),
                num_workers=min(1, self.num_workers),
                collate_fn=self.collate_fn,
                pin_memory=self.pin_memory,
                multiprocessing_context=self.multiprocessing_context,
                generator=torch.Generator().manual_seed(0),
                worker_init_fn=self.worker_init_fn,
            )
            return iter(loader_of_first_batches)
        if self.num_workers or self.pin_memory:
            iterator = super().__iter__()
            if self.num_workers and (repeats := getattr(self.dataset, "repeats", None)) is not None:
                repeats.is_due = False  # each loader process that has just begun has its own
            return iterator
        return map(self.dataset.__getitems__, sampler)  # type: ignore[attr-defined]


class StepSampler(Sampler[Any]):
    """A sampler that yields the remaining steps of an epoch.

    Args:
        order: the order of the training samples.
        steps_taken: returns the number of optimizer steps that the run has made. It is called when iteration begins,
            so a resumed run continues at its step. (Lightning would start its loader at batch 0.)
    """

    def __init__(self, order: DataOrder, steps_taken: Callable[[], int]) -> None:
        self.order = order
        self.steps_taken = steps_taken

    def __len__(self) -> int:
        return self.order.steps_per_epoch

    def __iter__(self) -> Iterator[StepPosition]:
        epoch, start = self.order.position(self.steps_taken())
        return ((epoch, index) for index in range(start, len(self)))


class StepDataset:
    """A training set whose items are `StepBatch`es: one process's parts of optimizer steps.

    From a data set in memory, one call of `fetch` gets the samples of several steps. A call for each step would be
    slower: the fixed cost of a call exceeds the time to copy the images of one step, and between two calls the training
    step fills the CPU's caches with other data.

    `StepSampler` is the DataLoader's `batch_sampler`. So torch calls `__getitems__` with what the sampler yields, one
    position, and not with a list of ids.

    Args:
        dataset: the training set, map-style.
        order: the order of its samples.
        rank: the process's number.
        augment: shifts and flips; it makes their random numbers.
        assignment: assigns the pieces of each step to devices.
        check: None, or a function that gets each fetched batch and its ids, and raises an error.
        stop_step: the number of steps of the run; None: unknown. Shards for later steps are not announced.
    """

    def __init__(
        self,
        dataset: Any,
        order: DataOrder,
        rank: int,
        augment: Augment,
        assignment: Assignment,
        check: BatchCheck | None = None,
        stop_step: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.order = order
        self.augment = augment
        self.assignment = assignment
        self.check = check
        self.rank = rank
        self._generators, self._repeats = Generators(dataset), Repeats("training", order.layout.exact, rank == 0)
        self._fetched_steps: dict[StepPosition, StepBatch] = {}  # fetched, but not yet returned
        self._fetched_layout: Layout | None = None  # the layout of these steps
        self.stop_step = stop_step
        self._epoch = -1  # for which the data set's `set_epoch` was called
        self._reads_ahead = reads_ahead(dataset) if isinstance(order, StreamOrder) else None
        self._announced: tuple[Layout | None, int, int] = (None, 0, 0)  # with this layout, from a step until another

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, position: StepPosition) -> StepBatch:
        self._announce_shards(*position)
        # A loader process fetches one step at a time: the next steps belong to other loader processes.
        in_loader_process = get_worker_info() is not None
        if in_loader_process or type(innermost_dataset(self.dataset)) is not ArrayDataset:
            return self._fetch(self._step_batch(*position))
        layout = self.assignment.layout_at(self._step_since_start(*position))
        if position not in self._fetched_steps or layout is not self._fetched_layout:
            self._fetched_steps, self._fetched_layout = self._fetch_steps(*position), layout
        return self._fetched_steps.pop(position)

    def fetch_piece(self, step_batch: StepBatch, piece: int, device: int) -> StepBatch:
        """Fetch one piece of a step for a device that need not own it."""
        epoch, index = self.order.position(step_batch.step)
        micro_batch = self._micro_batch(epoch, self.order.piece(epoch, index, piece), piece, device)
        return self._fetch(replace(step_batch, micro_batches=[micro_batch]))

    def _announce_shards(self, epoch: int, index: int) -> None:
        """Announce to a data set in shards which of them this process reads from a step on, if the list is new."""
        if self._reads_ahead is None:
            return
        assert isinstance(self.order, StreamOrder)
        step = self._step_since_start(epoch, index)
        layout = self.assignment.layout_at(step)
        before, start, stop = self._announced
        if layout is before and start <= step < stop:
            return
        pieces = [piece for _, piece in layout.micro_batches(self.rank)]
        needs, stop = self.order.shards_ahead(epoch, index, pieces, self._reads_ahead.read_ahead, self.stop_step)
        self._reads_ahead.will_need(step, needs)
        self._announced = layout, step, stop

    def _fetch(self, step_batch: StepBatch) -> StepBatch:
        """Fetch the samples of a step's micro-batches, one micro-batch at a time."""
        seed = self.order.seed
        if self._epoch != step_batch.epoch:  # here, since a loader process has a data set of its own
            self._epoch = step_batch.epoch
            set_epoch_of(self.dataset, self._epoch)
        for micro_batch in step_batch.micro_batches:
            keys = seed, micro_batch.epochs_and_repeats
            micro_batch.batch = fetch(self.dataset, micro_batch.ids, *keys, self._generators)
            if self.check is not None:
                self.check(micro_batch.batch, micro_batch.ids)
            numbers = self.augment.random_numbers(seed, micro_batch.epochs_and_repeats, micro_batch.ids)
            micro_batch.augmentation_numbers = numbers
        if not step_batch.step and step_batch.micro_batches and self._repeats.is_due:
            first = step_batch.micro_batches[0]
            self._repeats.check(self.dataset, first.ids, seed, first.epochs_and_repeats, self._generators)
        return step_batch

    def _fetch_steps(self, epoch: int, index: int) -> dict[StepPosition, StepBatch]:
        """Fetch step `index` of an epoch and the next steps by one call of `fetch`. Return them by their position."""
        order, source = self.order, innermost_dataset(self.dataset)
        most = FETCH_BYTES_ON_DEVICE if source.resident else FETCH_BYTES
        samples_per_step = -(-order.layout.batch_size // order.layout.replicas)  # of this process
        num_steps = max(1, most // (source.images[0].nbytes * samples_per_step))
        stop = min(index + num_steps, order.steps_per_epoch)
        step_batches = {(epoch, step): self._step_batch(epoch, step) for step in range(index, stop)}
        micro_batches = [
            micro_batch for step_batch in step_batches.values() for micro_batch in step_batch.micro_batches
        ]
        if not micro_batches:
            return step_batches
        sizes = [len(micro_batch.ids) for micro_batch in micro_batches]
        ids = np.concatenate([micro_batch.ids for micro_batch in micro_batches])
        parts = (part.split(sizes) for part in fetch(self.dataset, ids))
        for micro_batch, batch in zip(micro_batches, zip(*parts, strict=True), strict=True):
            micro_batch.batch = batch
        epochs_and_repeats = np.concatenate([micro_batch.epochs_and_repeats for micro_batch in micro_batches])
        numbers = self.augment.random_numbers(order.seed, epochs_and_repeats, ids)
        if numbers is not None:
            for micro_batch, its_numbers in zip(micro_batches, numbers.split(sizes), strict=True):
                micro_batch.augmentation_numbers = its_numbers
        return step_batches

    def _step_batch(self, epoch: int, index: int) -> StepBatch:
        """Return a process's part of a step, without its samples. Pieces without a sample are left out."""
        sizes, step = self.order.piece_sizes(index), self._step_since_start(epoch, index)
        layout = self.assignment.layout_at(step)
        num_nonempty = sum(1 for size in sizes if size)
        local_batches = [
            self._micro_batch(epoch, self.order.piece(epoch, index, piece), piece, device)
            for device, piece in layout.micro_batches(self.rank)
            if sizes[piece]
        ]
        if num_nonempty == len(sizes):
            fewest, most = 1, layout.accumulate
        else:
            ranks = range(layout.replicas)
            numbers = [sum(1 for _, piece in layout.micro_batches(rank) if sizes[piece]) for rank in ranks]
            fewest, most = min(numbers), max(numbers)
        return StepBatch(local_batches, sum(sizes), num_nonempty, epoch, step, fewest > 0, most)

    def _step_since_start(self, epoch: int, index: int) -> int:
        """Return the number of a step since the run began, 0-based."""
        return epoch * self.order.steps_per_epoch + index

    def _micro_batch(self, epoch: int, encoded_ids: Ids, piece: int, device: int) -> MicroBatch:
        """Return a micro-batch without its samples.

        Args:
            epoch: 0-based.
            encoded_ids: for each sample, its id + (size of the training set) * (number of its earlier uses in the
                epoch), int64 [n].
            piece: the number of the piece in its step.
            device: the number of the device that computes it.
        """
        repeats, ids = np.divmod(encoded_ids, self.order.samples)  # `samples` is the size of the training set
        # One number for each sample: the epoch in the lower 32 bits, its earlier uses in the upper ones. So a sample
        # that is used twice in an epoch gets other random numbers the second time.
        return MicroBatch(ids, device, piece, epochs_and_repeats=epoch + (repeats << 32))


class ChunkSampler(Sampler[Any]):
    """A sampler that yields the sample ids of each chunk.

    Args:
        chunks: those of this process.
        ids: the samples of the evaluation in order; None: those of the data set.

    torch would accept a list of ranges. But Lightning's `predict` needs a `Sampler`, which it wraps in a sampler that
    records the ids for a `BasePredictionWriter`.
    """

    def __init__(self, chunks: list[Chunk], ids: Ids | None = None) -> None:
        self.chunks, self.ids = chunks, ids

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[Any]:
        if self.ids is None:
            return (range(*chunk) for chunk in self.chunks)
        ids = self.ids
        return (ids[start:stop].tolist() for start, stop in self.chunks)


class ChunkDataset:
    """An evaluation set whose items are batches of neighbouring samples.

    `ChunkSampler` is the DataLoader's `batch_sampler`, so torch calls `__getitems__` with the range of a chunk.

    Args:
        dataset: the evaluation set, map-style.
        check: see `StepDataset`.
        chunks: those of this process in order, to announce the shards of a data set with `shard_borders`.
        repeats: the check of the samples that are fetched first; None: there is none.
    """

    def __init__(
        self,
        dataset: Any,
        check: BatchCheck | None = None,
        chunks: Sequence[Chunk] = (),
        repeats: Repeats | None = None,
    ) -> None:
        self.dataset, self.check, self.chunks, self.repeats = dataset, check, chunks, repeats
        self._generators = Generators(dataset)
        self._numbers = {chunk: number for number, chunk in enumerate(chunks)}
        self._reads_ahead = reads_ahead(dataset)
        self._shard_borders = getattr(self._reads_ahead, "shard_borders", None)
        self._announced_shard = -1  # the last shard of the chunk at which shards were announced

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, ids: range | list[int]) -> Any:
        if isinstance(ids, range):
            self._announce_shards(ids)
        numbers = np.asarray(ids, dtype=np.int64)
        batch = fetch(self.dataset, numbers, generators=self._generators)
        if self.repeats is not None and self.repeats.is_due:
            self.repeats.check(self.dataset, numbers, 0, np.zeros_like(numbers), self._generators)
        if self.check is not None:
            self.check(batch, ids)
        return batch

    def _announce_shards(self, ids: range) -> None:
        """Announce to a data set in shards which of them this process reads from a chunk on, if the list is new."""
        number = self._numbers.get((ids.start, ids.stop))
        if self._reads_ahead is None or self._shard_borders is None or number is None:
            return
        last_shard = int(np.searchsorted(self._shard_borders, ids.stop))
        if last_shard != self._announced_shard:
            needs = shards_of_chunks(self._shard_borders, self.chunks, number, self._reads_ahead.read_ahead)
            self._reads_ahead.will_need(number, needs)
            self._announced_shard = last_shard


def chunks_of_rank(
    num_samples: int,
    layout: Layout,
    rank: int,
    trains: bool = True,
    batch_size: int | Sequence[int] | None = None,
    most: int | None = None,
) -> list[Chunk]:
    """Return the chunks of neighbouring samples that a process evaluates.

    Over all processes, every sample is in exactly one chunk. The size of a chunk is the same on all layouts with the
    same `batch_size` and `pieces`, because kernels may round differently for another size.

    Without a `batch_size` of the evaluation, a chunk has the size of a piece. In a training run, a chunk smaller than
    128 samples is then enlarged to 128, or to two pieces if that is less, since small chunks waste time. Evaluating two
    pieces takes 0.5 (resnet18) to 1.05 times (small_cnn) the peak memory of training one. A small set is cut into
    smaller chunks, about `pieces` of them, to give every process work.

    Args:
        num_samples: number of samples of the evaluation set.
        rank: the process's number among `layout.replicas`.
        trains: whether this is a training run. If not, `batch_size` was chosen for an evaluation.
        batch_size: the samples of a chunk, or of each; None: they follow from the piece.
        most: only so many of the first samples are evaluated, over all processes; None: all.

    Returns:
        `(start, stop)` of each chunk; empty if there are fewer chunks than processes.
    """
    stop = num_samples if most is None else min(most, num_samples)
    if isinstance(batch_size, Sequence):
        chunks = [(start, end) for start, end in pairwise([0, *accumulate(batch_size)]) if end <= stop]
    else:
        if batch_size is None:
            piece = max(1, layout.batch_size // layout.pieces)
            size = max(piece, min(2 * piece, 128)) if trains else piece
            size = min(-(-num_samples // layout.pieces), size)
        else:
            size = batch_size
        chunks = [(start, min(start + size, stop)) for start in range(0, stop, size)]  # the last one may be short
    borders = cuts(len(chunks), layout.replicas)
    return chunks[borders[rank] : borders[rank + 1]]


def limited(num_samples: int, batch_size: int | Sequence[int], limit: int | float | None, name: str) -> int:
    """Return the number of samples that an evaluation has under a limit such as Lightning's `limit_val_batches`.

    Args:
        num_samples: samples of the evaluation set.
        batch_size: samples of a batch, over all processes, or of each batch.
        limit: a number of batches, or as a float a part of them; None: all.
        name: the limit's name, for messages.
    """
    if limit is None or (limit == 1.0 and isinstance(limit, float)):
        return num_samples
    batches = len(batch_size) if isinstance(batch_size, Sequence) else -(-num_samples // batch_size)
    number = limit if isinstance(limit, int) else int(batches * limit)
    if limit and not number and batches:
        least = f"give at least {1 / batches:.3g}, or a whole number of batches"
        raise UserError(f"{name}={limit} of {batches} batches is less than one: {least}")
    if isinstance(batch_size, Sequence):
        return sum(batch_size[:number])
    return min(number * batch_size, num_samples)


def gains_from_loader_processes(dataset: Any) -> bool:
    """Check whether loader processes make a data set faster.

    The data set's class may answer by an attribute `wants_workers`. If it has none, a data set that is not fast by
    itself gains from them, but on Linux only: there they are forked, so they start without importing and unpickling the
    data set.
    """
    innermost = innermost_dataset(dataset)
    # `__getitems__` fetches a batch by one call. A sequence or TensorDataset has its samples in memory.
    is_fast_itself = hasattr(innermost, "__getitems__") or isinstance(innermost, Sequence | TensorDataset)
    return bool(getattr(innermost, "wants_workers", sys.platform == "linux" and not is_fast_itself))


def set_up_loader_process(parent: int, start: Callable[[int], None] | None, loader: Any, worker: int) -> None:
    """Set up a loader process: it ignores signals to the process group, ends with its parent, and calls `start`.

    `start` is the `worker_init_fn` of a user's `loader`.

    A signal to the whole process group must not end it, since the current step still needs it. If the parent dies, it
    must end, since it keeps the parent's connections to other ranks open.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _excepthook
    set_parent_death_signal(parent)
    if folder := environment().scratch:
        tempfile.tempdir = folder  # the run removes this folder, with this process's sockets, even after a kill
    if start is not None:
        object.__setattr__(get_worker_info(), "dataset", loader.dataset)  # the user's; torch's object is frozen
        start(worker)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error unless it is a lost connection: the thread that sends tensors gets one if the parent has died."""
    if not issubclass(kind, ConnectionError):
        sys.__excepthook__(kind, error, trace)


def identity(batch: Any) -> Any:
    """Return the batch: the data set has collated it already."""
    return batch
