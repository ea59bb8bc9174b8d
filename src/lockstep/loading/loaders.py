"""From a plan to loaders: which samples a process fetches, and when. Nothing here has a state to be saved."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, TensorDataset, get_worker_info

from lockstep.arithmetic.layout import Layout, Refusal
from lockstep.arithmetic.order import DataOrder, chunks, cuts
from lockstep.launch.environment import external_workers
from lockstep.loading.augment import Augment
from lockstep.loading.datasets import ArrayDataset, Splits, fetch
from lockstep.loading.resident import Resident, base
from lockstep.step.batch import MicroBatch, StepBatch

At = tuple[int, int]
Cut = tuple[int, int, int]
GATHERED = 1 << 20  # bytes of images that are gathered at once, of a set in memory


class StepSampler(Sampler[Any]):
    """Yields `(epoch, index, pieces)` of the epoch's remaining steps.

    Args:
        steps_taken: tells how many optimizer steps the run has made. It is asked when iteration begins and not before,
            so a resumed run goes on where it stopped; Lightning would start its loader at batch 0.
        pieces: tells into how many pieces a step is cut. It is asked at each step: memory may run out in mid-training.
    """

    def __init__(self, order: DataOrder, steps_taken: Callable[[], int], pieces: Callable[[], int]) -> None:
        self.order = order
        self.steps_taken = steps_taken
        self.pieces = pieces

    def __len__(self) -> int:
        return self.order.steps_per_epoch

    def __iter__(self) -> Iterator[Cut]:
        epoch, start = self.order.position(self.steps_taken())
        for index in range(start, len(self)):
            yield epoch, index, self.pieces()


class Loader(DataLoader[Any]):
    """torch's DataLoader, but a plain loop without loader processes: its iterator would take 0.1 ms a batch more."""

    def __iter__(self) -> Any:
        if self.num_workers or self.pin_memory:
            return super().__iter__()
        return map(self.dataset.__getitems__, self.batch_sampler)  # type: ignore[attr-defined, arg-type]


class StepDataset:
    """A training set whose items are one process's shares of optimizer steps.

    Of a set in memory, the samples of several steps are gathered at once: between two steps all caches are cold, and
    getting there takes longer than gathering.
    """

    def __init__(self, dataset: Any, order: DataOrder, layout: Layout, process: int, augment: Augment) -> None:
        self.dataset = dataset
        self.order = order
        self.layout = layout
        self.process = process
        self.augment = augment
        self._fetched: dict[Cut, StepBatch] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, at: Cut) -> StepBatch:
        if at not in self._fetched:
            self._fetched = self._fetch(*at)
        return self._fetched.pop(at)

    def _fetch(self, epoch: int, index: int, cut: int) -> dict[Cut, StepBatch]:
        """The share of step `index`, and those of the steps after it that are gathered with it."""
        store = base(self.dataset)
        alone = get_worker_info() is None  # loader processes may be many, each has its own memory, and nobody waits
        held = alone and type(store) in (ArrayDataset, Resident)
        together = 1
        if held:
            samples = -(-self.layout.batch_size // self.layout.world_size)
            together = max(1, GATHERED // (store.images[0].nbytes * samples))
        last = min(index + together, self.order.steps_per_epoch)
        shares = {(epoch, step, cut): self._share(epoch, step, cut) for step in range(index, last)}
        micro_batches = [micro_batch for step_batch in shares.values() for micro_batch in step_batch.micro_batches]
        if not micro_batches:
            return shares
        seed, sizes = self.order.seed, [len(micro_batch.ids) for micro_batch in micro_batches]
        ids = np.concatenate([micro_batch.ids for micro_batch in micro_batches])
        if held:
            batches: Any = zip(*(part.split(sizes) for part in fetch(self.dataset, ids)), strict=True)
        else:
            batches = (fetch(self.dataset, micro_batch.ids, seed, epoch) for micro_batch in micro_batches)
        if alone:
            table = _draws(self.augment, seed, epoch, self.order.samples)
            draws = None if table is None else table[ids]
        else:
            draws = self.augment.draws(seed, epoch, ids)
        for micro_batch, batch, own in zip(
            micro_batches, batches, [None] * len(micro_batches) if draws is None else draws.split(sizes), strict=True
        ):
            micro_batch.batch, micro_batch.draws = batch, own
        return shares

    def _share(self, epoch: int, index: int, cut: int) -> StepBatch:
        """Who computes which samples of a step; they are still to be fetched."""
        ids = self.order.step(epoch, index)
        layout = self.layout if cut == self.layout.pieces else replace(self.layout, pieces=cut)
        mine, pieces, everyone = _share(layout, self.process, len(ids))
        micro_batches = []
        for micro_batch in mine:
            devices, numbers, starts, stops = zip(*micro_batch, strict=True)
            spans = list(zip(starts, stops, strict=True))
            own = np.concatenate([ids[start:stop] for start, stop in spans])
            micro_batches.append(
                MicroBatch(None, own, None, devices, numbers, tuple(stop - start for start, stop in spans))
            )
        return StepBatch(
            micro_batches, len(ids), pieces, epoch, epoch * self.order.steps_per_epoch + index, everyone, cut
        )


@lru_cache(maxsize=2)
def _draws(augment: Augment, seed: int, epoch: int, samples: int) -> Tensor | None:
    """All samples of an epoch at once: step by step, the draws would take 1% of a small network's time."""
    return augment.draws(seed, epoch, np.arange(samples))


@lru_cache(maxsize=8)
def _share(layout: Layout, process: int, samples: int) -> tuple[list[list[tuple[int, int, int, int]]], int, bool]:
    """For a step of `samples`: a process's turns as `(device, piece, start, stop)`, the number of pieces that have a
    sample, and whether every process has one. Pieces without a sample and turns without a piece are left out."""
    at = cuts(samples, layout.pieces)

    def micro_batches(process: int) -> list[list[tuple[int, int, int, int]]]:
        found = [
            [(device, piece, at[piece], at[piece + 1]) for device, piece in micro_batch if at[piece] < at[piece + 1]]
            for micro_batch in layout.micro_batches(process)
        ]
        return [micro_batch for micro_batch in found if micro_batch]

    return (
        micro_batches(process),
        min(samples, layout.pieces),
        all(micro_batches(other) for other in range(layout.world_size)),
    )


class ChunkSampler(Sampler[range]):
    """Yields the sample ids of each chunk `(start, stop)`. No list, as Lightning's `predict` wraps a sampler, and tells
    a `BasePredictionWriter` what it yields."""

    def __init__(self, at: list[At]) -> None:
        self.at = at

    def __len__(self) -> int:
        return len(self.at)

    def __iter__(self) -> Iterator[range]:
        return (range(*chunk) for chunk in self.at)


class ChunkDataset:
    """An evaluation set whose items are batches of neighbouring samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, ids: range) -> Any:
        return fetch(self.dataset, np.arange(ids.start, ids.stop))


def own_chunks(samples: int, layout: Layout, process: int, trains: bool = True) -> list[At]:
    """The run of neighbouring chunks that a process evaluates; empty where there are fewer chunks than processes.

    Over all processes every sample is in one chunk. A chunk's size is the same on every layout with the same
    `batch_size` and `pieces`, since kernels may round differently for batches of another size. It is a piece's, and in
    a run that trains up to 128 samples where that is more: small chunks only cost time. But not more than two pieces,
    which take about what one does in training (peaks measured: resnet18 half of that, mnist_cnn 1.05 of it).
    """
    piece = max(1, layout.batch_size // layout.pieces)
    size = max(piece, min(2 * piece, 128)) if trains else piece
    parts = chunks(samples, min(-(-samples // layout.pieces), size))
    at = cuts(len(parts), layout.world_size)
    return parts[at[process] : at[process + 1]]


def streams(dataset: Any) -> bool:
    """Whether loader processes pay: a dataset says so by `streams`, else one does whose samples are made one by one.

    Not where these are at hand in memory. Nor where the dataset holds what processes can't share: of an open file,
    forked ones would move each other's position, silently.
    """
    found = base(dataset)
    if hasattr(found, "streams"):
        return bool(found.streams)
    if hasattr(found, "__getitems__") or isinstance(found, Sequence | TensorDataset):
        return False
    try:
        _Probe(SimpleNamespace(write=len)).dump(found)  # an open file can't be pickled, nor a database's connection
    except Exception:  # a class of anybody's may raise anything
        return False
    return sys.platform == "linux"  # elsewhere processes are not forked, and classes and functions must be found again


def refuse_open_files(splits: Splits, layout: Layout, num_workers: int | None) -> None:
    """Where a run forks several processes, they would move each other's position in a file that is open before.

    Raises:
        Refusal: a set holds one, and does not say by `streams` that it may be shared.
    """
    ranks = layout.strategy == "ddp" and layout.devices > 1 and not external_workers()
    sets = map(base, (splits.train, splits.val, splits.test) if ranks or num_workers else ())
    for found in {id(each): each for each in sets}.values():  # what is held out has the same below it
        try:
            if not getattr(found, "streams", False):
                _Probe(SimpleNamespace(write=len)).dump(found)
        except _OpenFile as error:
            raise Refusal(
                f"{type(found).__name__}: this data set holds an open file ({error}), and processes would move each "
                "other's position in it: open it at first use, in __getitem__"
            ) from None
        except Exception:  # what else can't be pickled may be shared
            continue


class _OpenFile(Exception):
    """Its message is the file's name."""


class _Probe(pickle.Pickler):
    """Leaves out what forked processes share, and what would take long.

    Raises:
        _OpenFile: there is one that is read.
    """

    def reducer_override(self, obj: Any) -> Any:
        file = isinstance(obj, io.IOBase) and not isinstance(obj, io.BytesIO | io.StringIO)
        if file and not obj.closed and obj.readable():
            raise _OpenFile(getattr(obj, "name", obj))
        shared = isinstance(obj, Tensor | np.ndarray | type | FunctionType)
        return (int, ()) if shared and obj is not int else NotImplemented
