"""The DataModule: loaders for one process, and the last steps of a batch on its device."""

import logging
import os
import signal
import sys
import tempfile
from functools import cached_property, partial
from types import TracebackType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.arithmetic.deal import Deal
from lockstep.arithmetic.layout import Layout
from lockstep.data.datasets import Ids, Splits, base, labels_of
from lockstep.data.loaders import ChunkDataset, ChunkSampler, Loader, StepDataset, StepSampler, own_chunks, streams
from lockstep.data.on_device import Resident, place
from lockstep.launch.environment import environment
from lockstep.launch.machine import cores_of_each
from lockstep.launch.signals import set_parent_death_signal
from lockstep.step.batch import MicroBatch, StepBatch

LOG = logging.getLogger("lockstep")


class DataModule(pl.LightningDataModule):
    """Training batches are `StepBatch`s, evaluation batches plain `(x, y)`.

    Args:
        splits: the opened data (`lockstep.data.build.open_data`).
        layout: who computes which piece.
        seed: the run's seed; order and augmentation follow from it.
        rank: this process's number among `layout.replicas`.
        num_workers: loader processes of this process; None: none for sets in memory, else the cores of the machine
            over its processes, 1 to 8.
        resident: whether sets in memory lie on the GPU: true, false or auto, see `lockstep.data.on_device`.
        trains: whether `batch_size` was chosen for training; else for evaluation.
        deal: who computes which piece at each step; None: as the layout says.

    Attributes:
        order: the training set's.
    """

    def __init__(
        self,
        splits: Splits,
        layout: Layout,
        seed: int,
        rank: int = 0,
        num_workers: int | None = None,
        resident: bool | str = "auto",
        trains: bool = True,
        deal: Deal | None = None,
    ) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True  # a process may have nothing to predict
        self.splits = splits
        self.layout = layout
        self.rank = rank
        self.num_workers = num_workers
        self.resident = resident
        self.trains = trains
        self.deal = deal or Deal(layout)
        self.order = splits.order(layout, seed)
        self._placed: Splits | None = None
        self._scales: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._like: Tensor | None = None  # a parameter whose dtype images get

    @property
    def _module(self) -> pl.LightningModule:
        assert self.trainer is not None
        return self.trainer.lightning_module

    def setup(self, stage: str) -> None:
        """Before loaders are made: sets in memory go to the GPU, where there is one."""
        assert self.trainer is not None
        # now: a walk over the module's layers takes longer than the rest of `finish`
        self._like = next((p for p in self._module.parameters() if p.is_floating_point()), None)
        device = self.trainer.strategy.root_device
        if self._placed is None and device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            self._placed = place(self.splits, device, self.resident, free)
            if self._placed is not self.splits and self.rank == 0:
                LOG.info("sets in memory lie on the GPU")

    @cached_property
    def labels(self) -> Ids:
        """Of the training samples, in the set's order; raises as `labels_of`."""
        return labels_of(self.splits.train)

    def labels_of_step(self, step_batch: StepBatch) -> Ids:
        """Of all samples of a step, whichever process computes them; raises as `labels_of`."""
        index = step_batch.step - step_batch.epoch * self.order.steps_per_epoch
        return self.labels[self.order.step(step_batch.epoch, index)]

    # --- loaders ---

    def _set(self, split: str) -> Any:
        return getattr(self._placed or self.splits, split)

    def _steps(self) -> StepDataset:
        return StepDataset(self._set("train"), self.order, self.rank, self.splits.augment, self.deal)

    def train_dataloader(self) -> DataLoader[Any]:
        trainer: Any = self.trainer
        dataset = self._steps()
        return self._loader(dataset, StepSampler(self.order, lambda: trainer.global_step), keep_workers=True)

    def val_dataloader(self) -> Any:
        if self.splits.val is None:
            return []
        loader = self._evaluation("val")
        loader.checking = lambda: bool(getattr(self.trainer, "sanity_checking", False))
        return loader

    def test_dataloader(self) -> DataLoader[Any]:
        return self._evaluation("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """The test set in its order; of several processes each has the run of samples that it evaluates, or none."""
        return self._evaluation("test", least=0)

    def stand_in(self, split: str) -> bool:
        """Whether this process has no sample of `val` or `test` to evaluate. It then gets one all the same, so that it
        joins every collective, and its result must be forgotten."""
        return not self._chunks(getattr(self.splits, split))

    def samples_here(self, split: str) -> int:
        """How many samples of `val` or `test` this process evaluates."""
        return sum(stop - start for start, stop in self._chunks(getattr(self.splits, split)))

    def _evaluation(self, split: str, least: int = 1) -> Loader:
        dataset = self._set(split)
        return self._loader(ChunkDataset(dataset), ChunkSampler(self._chunks(dataset) or [(0, 1)] * least))

    def _chunks(self, dataset: Any) -> list[tuple[int, int]]:
        return own_chunks(len(dataset), self.layout, self.rank, self.trains)

    def _loader(self, dataset: Any, sampler: Any, keep_workers: bool = False) -> Loader:
        resident = isinstance(base(dataset.dataset), Resident)
        workers = 0 if resident else self.num_workers  # another process would have to fetch from the GPU
        if workers is None and streams(dataset.dataset):
            workers = min(8, cores_of_each(self.layout.world_size // self.layout.num_nodes))
        return Loader(
            dataset,
            batch_sampler=sampler,
            num_workers=workers or 0,
            collate_fn=_same,
            pin_memory=self.layout.accelerator == "gpu" and torch.cuda.is_available() and not resident,
            persistent_workers=keep_workers and bool(workers),
            # Python 3.14 would start them from a server, which `set_parent_death_signal` takes for a dead parent
            multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
            # its own, since iterating draws a number: from the global one that would move what comes after
            generator=torch.Generator().manual_seed(self.order.seed),
            worker_init_fn=partial(_as_loader, os.getpid()),
        )

    # --- on the device ---

    def fetch_piece(self, step_batch: StepBatch, piece: int, device: int) -> MicroBatch:
        """Fetch a piece of the step alone, for a device (its number over all nodes) of this process."""
        found = self._steps().fetch_piece(step_batch, piece, device)
        assert self.trainer is not None
        return self.transfer_batch_to_device(found, self.trainer.strategy.root_device, 0).micro_batches[0]

    def piece(self, split: str) -> Any:
        """The first samples of `train` or `test`, as many as a piece has, as a step of the module sees them."""
        dataset = ChunkDataset(self._set(split))
        batch = dataset.__getitems__(range(min(self.layout.piece_size, len(dataset))))
        assert self.trainer is not None
        device = self.trainer.strategy.root_device
        return self.on_after_batch_transfer(self.transfer_batch_to_device(batch, device, 0), 0)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        if isinstance(batch, StepBatch):
            return batch if device.type == "cpu" else batch.to(device)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """An evaluation batch as the module sees it; a module's own hook of this name comes last, as in training."""
        if isinstance(batch, StepBatch):
            return batch
        return self._module.on_after_batch_transfer(self._ready(batch), dataloader_idx)

    def finish(self, micro_batch: MicroBatch) -> Any:
        """The batch that `training_step` sees, but for what the module does to it: `x` [n, C, H, W] augmented and
        normalised, in the module's floating dtype, and what the dataset gives beside it (`y`, int64 [n])."""
        return self._ready(micro_batch.batch, micro_batch.draws)

    @property
    def mixes(self) -> bool:
        """Whether a piece's samples are mixed."""
        return bool(self.splits.mix)

    def mix(self, batch: Any) -> Any:
        """A piece's batch whose samples have been mixed: `y` is then [n, classes], in the dtype of `x`."""
        x, y, *rest = batch
        x, y = self.splits.mix(x, y)
        return (x, y.to(x.dtype), *rest)

    def _ready(self, batch: Any, draws: Tensor | None = None) -> Any:
        if not isinstance(batch, tuple | list) or not isinstance(batch[0], Tensor):
            return batch  # a dict, say: its module knows what to do with it
        x, *rest = batch
        if draws is not None:
            x = self.splits.augment(x, draws)
        dtype = torch.get_default_dtype() if self._like is None else self._like.dtype
        if x.dtype == torch.uint8:
            x = self._normalise(x, dtype)
        elif x.is_floating_point():
            # kernels are chosen by alignment, and a view of a gather may begin anywhere
            x = x.to(dtype, copy=x.is_cuda)
        return (x, *rest)

    def _normalise(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        key = images.device, dtype
        if key not in self._scales:
            moments = self.splits.spec.mean, self.splits.spec.std
            mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in moments)
            self._scales[key] = (1 / (255 * std)).to(*key), (-mean / std).to(*key)
        scale, shift = self._scales[key]
        # Two roundings: a fused one would depend on where in the batch a pixel lies (vector body or scalar tail).
        return images.to(dtype).mul_(scale).add_(shift)


def _as_loader(parent: int, worker: int) -> None:
    """Who asks the whole process group to end must not end the loader processes: the step under way needs them. But
    they end with the process that they load for: they hold its connections to other ranks open."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _excepthook
    set_parent_death_signal(parent)
    if folder := environment().scratch:
        tempfile.tempdir = folder  # of this process: its sockets go with the run, also when it is killed


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The thread that hands tensors over says so when who should take them is gone; that is no news."""
    if not issubclass(kind, ConnectionError):
        sys.__excepthook__(kind, error, trace)


def _same(batch: Any) -> Any:
    return batch
