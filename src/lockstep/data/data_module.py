"""The data module of a step: loaders of one process, and the preparation of a batch on its device."""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from types import TracebackType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lockstep.arithmetic.layout import Assignment, Layout
from lockstep.arithmetic.streams import StreamOrder
from lockstep.data.augment import Augment
from lockstep.data.datasets import UNLABELLED, ArrayDataset, Ids, Resident, SampleSets, Splits, innermost_dataset
from lockstep.data.labels import LabelCheck, in_memory, label_checks
from lockstep.data.loaders import (
    Chunk,
    ChunkDataset,
    ChunkSampler,
    Loader,
    StepDataset,
    StepSampler,
    chunks_of_rank,
    gains_from_loader_processes,
    limited,
)
from lockstep.errors import UserError
from lockstep.launch.environment import environment
from lockstep.launch.machine import cores_per_worker, most_loader_processes
from lockstep.launch.process_lifetime import refuse_daemon
from lockstep.launch.signals import set_parent_death_signal
from lockstep.lightning.hooks import overrides_method
from lockstep.step.batch import EvaluationShare, MicroBatch, StepBatch

LOG = logging.getLogger("lockstep")
MIB = 1 << 20


class StepDataModule(pl.LightningDataModule):
    """The data of one process: training batches are `StepBatch`es. Samples are used as the data sets return them.

    Args:
        splits: the data sets.
        layout: assigns pieces to devices.
        seed: the run's seed. The order of samples and their random numbers depend on it.
        rank: this process's number among `layout.replicas`.
        num_workers: loader processes of this process, `most_loader_processes` at most. None: none for data sets in
            memory, else the machine's cores divided by its number of ranks, at least 1 and at most 8.
        trains: whether this is a training run. If not, `batch_size` was chosen for an evaluation.
        assignment: assigns the pieces of each step to devices. None: as `layout` does.

    Attributes:
        order: the order of the training samples.
    """

    def __init__(
        self,
        splits: SampleSets,
        layout: Layout,
        seed: int,
        rank: int = 0,
        num_workers: int | None = None,
        trains: bool = True,
        assignment: Assignment | None = None,
    ) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True  # a process may have no sample to predict
        self.splits: Any = splits
        self.layout = layout
        self.rank = rank
        most = most_loader_processes(layout.world_size // layout.num_nodes)
        if num_workers is not None and num_workers > most:
            if rank == 0:
                can_use = "more than this machine's cores can use, so each worker has"
                LOG.warning("num_workers=%d: %s %d", num_workers, can_use, most)
            num_workers = most
        self.num_workers = num_workers
        self.trains = trains
        self.assignment = assignment or Assignment(layout)
        self.order = splits.order(layout, seed)
        self._shares: dict[Any, tuple[EvaluationShare, ...]] = {}  # by split and the samples that are evaluated
        self._chunks_of: dict[Any, list[Chunk]] = {}  # by split, rank, samples, and those that are evaluated

    @property
    def _module(self) -> pl.LightningModule:
        assert self.trainer is not None
        return self.trainer.lightning_module

    # --- what differs with the kind of the data ---

    def _dataset_of(self, split: str) -> Any:
        return getattr(self.splits, split)

    def _label_check(self, split: str) -> LabelCheck | None:
        """Return what checks the labels of each batch; None: nothing does."""
        return None

    def _evaluation_batch_size(self, split: str) -> int | list[int] | None:
        """Return the samples of a batch of `val` or `test`, or of each batch; None: they follow from the layout."""
        return None

    def _evaluated(self, split: str) -> tuple[int, Ids | None]:
        """Return how many samples of `val` or `test` are evaluated, and which; None: those of the data set in order."""
        return len(getattr(self.splits, split)), None

    def _processes_of(self, split: str) -> tuple[int | None, Callable[[int], None] | None]:
        """Return the number of loader processes of a split, and what is called in each; see `num_workers`."""
        return self.num_workers, None

    @property
    def _augment(self) -> Augment:
        return Augment()

    def _prepared(self, batch: Any, augmentation_numbers: Tensor | None = None) -> Any:
        """Return a batch for the module.

        Floating-point tensors are copied: a view of a larger tensor may begin at any address, and MKL and CUDA choose
        some kernels by the alignment of their input. Another kernel may round differently.
        """
        assert self.trainer is not None
        return self.trainer.precision_plugin.convert_input(apply_to_collection(batch, Tensor, _copied))

    @property
    def mixes(self) -> bool:
        """True if a piece's samples are mixed."""
        return False

    def mix(self, batch: Any) -> Any:
        """Return a piece's batch with its samples mixed: here as it is."""
        return batch

    # --- loaders ---

    def _steps(self) -> StepDataset:
        dataset, check = self._dataset_of("train"), self._label_check("train")
        return StepDataset(dataset, self.order, self.rank, self._augment, self.assignment, check, self._stop_step)

    @property
    def _stop_step(self) -> int | None:
        """The number of steps after which the run ends; None: it has no limit, or no shards to announce until then."""
        if not isinstance(self.order, StreamOrder):
            return None
        trainer: Any = self.trainer
        epochs = trainer.max_epochs
        limits = [trainer.max_steps, -1 if epochs is None else epochs * self.order.steps_per_epoch]
        return min((limit for limit in limits if limit >= 0), default=None)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of an epoch's remaining steps."""
        trainer: Any = self.trainer
        sampler = StepSampler(self.order, partial(getattr, trainer, "global_step"))
        return self._loader(self._steps(), sampler, "train", keep_workers=True)

    def val_dataloader(self) -> Any:
        """Return the loader of this process's validation samples; an empty list without a validation set."""
        if self.splits.val is None:
            return []
        return self._evaluations("val")

    def _sanity_batches(self) -> float:
        checks = getattr(self.trainer, "sanity_checking", False)
        return self.trainer.num_sanity_val_steps if checks else 0  # type: ignore[union-attr]

    def test_dataloader(self) -> Any:
        """Return the loader of this process's test samples."""
        return self._evaluations("test")

    def predict_dataloader(self) -> Any:
        """Return the loader of this process's part of the test set, in its order; the part may be empty."""
        return self._evaluations("test", min_batches=0)

    def evaluation_splits(self, part: str) -> list[str]:
        """Return the names of the splits that the loaders of `val` or `test` read: here there is one."""
        return [part]

    def _evaluations(self, part: str, min_batches: int = 1) -> Any:
        """Return the loader of this process's samples of `val` or `test`; a list of several."""
        loaders = [self._evaluation(split, min_batches) for split in self.evaluation_splits(part)]
        if part == "val":
            for loader in loaders:
                loader.sanity_batches = self._sanity_batches
        return loaders[0] if len(loaders) == 1 else loaders

    def num_local_samples(self, split: str) -> int:
        """Return the number of samples of `val` or `test` that this process evaluates.

        If there is none, its loader yields one sample, so that this process joins every collective. Drop its result.
        """
        return self.evaluation_shares(split)[self.rank].samples

    def first_sample(self, split: str, batch_idx: int) -> int:
        """Return the number of the first sample of a batch that this process evaluates; 0 if it has no sample."""
        chunks = self._chunks(split, self.rank)
        return chunks[batch_idx][0] if chunks else 0

    def samples_of_batch(self, split: str, batch_idx: int) -> int:
        """Return the number of samples of a batch that this process evaluates; 1 if it has no sample."""
        chunks = self._chunks(split, self.rank)
        start, stop = chunks[batch_idx] if chunks else (0, 1)
        return stop - start

    def evaluation_shares(self, split: str) -> tuple[EvaluationShare, ...]:
        """Return what each process evaluates of `val` or `test`, in rank order; of several loaders, of all of them."""
        splits = self.evaluation_splits(split) if "." not in split else [split]
        key = split, tuple(map(self._most, splits))
        if key not in self._shares:
            ranks = range(self.layout.replicas)
            chunks = [[chunk for each in splits for chunk in self._chunks(each, rank)] for rank in ranks]
            self._shares[key] = tuple(
                EvaluationShare(len(each), sum(stop - start for start, stop in each)) for each in chunks
            )
        return self._shares[key]

    def _evaluation(self, split: str, min_batches: int = 1) -> Loader:
        dataset = self._dataset_of(split)
        chunks = self._chunks(split, self.rank) or [(0, 1)] * min_batches
        checked = ChunkDataset(dataset, self._label_check(split), chunks)
        return self._loader(checked, ChunkSampler(chunks, self._evaluated(split)[1]), split)

    def _chunks(self, split: str, rank: int) -> list[Chunk]:
        samples, most = self._evaluated(split)[0], self._most(split)
        key = split, rank, samples, most
        if key not in self._chunks_of:  # each batch of an evaluation asks
            size = self._evaluation_batch_size(split)
            self._chunks_of[key] = chunks_of_rank(samples, self.layout, rank, self.trains, size, most)
        return self._chunks_of[key]

    def _most(self, split: str) -> int:
        """Return how many samples of `val` or `test` are evaluated, over all processes: its batches may be limited."""
        part = "predict" if getattr(self.trainer, "predicting", False) else split.partition(".")[0]
        name = f"limit_{part}_batches"
        limit = getattr(self.trainer, "limits", {}).get(name, getattr(self.trainer, name, None))
        batch_size = self._evaluation_batch_size(split) or self.layout.batch_size
        return limited(self._evaluated(split)[0], batch_size, limit, name)

    def _loader(self, dataset: Any, sampler: Any, split: str, keep_workers: bool = False) -> Loader:
        resident = isinstance(innermost_dataset(dataset.dataset), Resident)
        # of a step, the random numbers are on the host, even if its images are on the GPU
        pinned = not resident or isinstance(dataset, StepDataset)
        workers, start = self._processes_of(split)
        workers = 0 if resident else workers  # a loader process would have to read from the GPU
        if workers is None and gains_from_loader_processes(dataset.dataset):
            workers = min(8, cores_per_worker(self.layout.world_size // self.layout.num_nodes))
        if workers:
            refuse_daemon(f"num_workers={workers}", "give num_workers=0")
        return Loader(
            dataset,
            batch_sampler=sampler,
            num_workers=workers or 0,
            collate_fn=_identity,
            pin_memory=self.layout.accelerator == "gpu" and torch.cuda.is_available() and pinned,
            persistent_workers=keep_workers and bool(workers),
            # Python 3.14 starts loader processes from a server process by default, but `set_parent_death_signal` works
            # only if this process is their parent.
            multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
            # Each iterator draws a seed from this generator. Drawn from torch's global one, it would change all later
            # random numbers.
            generator=torch.Generator().manual_seed(self.order.seed),
            worker_init_fn=partial(_set_up_loader_process, os.getpid(), start),
        )

    # --- on the device ---

    def fetch_piece(self, step_batch: StepBatch, piece: int, device: int) -> MicroBatch:
        """Fetch one piece of a step for the device with this index, which counts the devices of all nodes."""
        fetched = self._steps().fetch_piece(step_batch, piece, device)
        assert self.trainer is not None
        return self.transfer_batch_to_device(fetched, self.trainer.strategy.root_device, 0).micro_batches[0]

    def transfer_hook(self, name: str) -> Callable[..., Any] | None:
        """Return the user's hook of the transfer of a batch with this name; None if there is none."""
        for each in self._hook_owners():
            if overrides_method(each, name, pl.LightningModule):
                hook: Callable[..., Any] = getattr(each, name)
                return hook
        return None

    def _hook_owners(self) -> list[Any]:
        """Return whose hooks are called; of those with a hook the first one's."""
        return [self._module]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Call the user's hook with the batch of an evaluation."""
        hook = self.transfer_hook("on_before_batch_transfer")
        return batch if hook is None else hook(batch, dataloader_idx)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to a device, by the user's hook if there is one. On a CPU, a `StepBatch` is already there."""
        if isinstance(batch, StepBatch):
            return batch if device.type == "cpu" else batch.to(device)
        hook = self.transfer_hook("transfer_batch_to_device")
        return (hook or super().transfer_batch_to_device)(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Prepare an evaluation batch; then call the user's hook of this name, as in training."""
        if isinstance(batch, StepBatch):
            return batch
        hook, prepared = self.transfer_hook("on_after_batch_transfer"), self._prepared(batch)
        return prepared if hook is None else hook(prepared, dataloader_idx)

    def prepare(self, micro_batch: MicroBatch) -> Any:
        """Return the batch of a micro-batch for `training_step`, before mixing and the module's hooks."""
        return self._prepared(micro_batch.batch, micro_batch.augmentation_numbers)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_floating_point() else tensor


class ImageDataModule(StepDataModule):
    """The data of one process, of images: they are augmented and normalised on the device, a batch at a time.

    Args:
        splits: the opened data (`lockstep.data.build.open_data`).
        layout: see `StepDataModule`.
        seed: see `StepDataModule`.
        rank: see `StepDataModule`.
        num_workers: see `StepDataModule`.
        resident: whether data sets in memory are copied to the GPU: true, false or auto; see `place_on_device`.
        trains: see `StepDataModule`.
        assignment: see `StepDataModule`.
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
        assignment: Assignment | None = None,
    ) -> None:
        super().__init__(splits, layout, seed, rank, num_workers, trains, assignment)
        self.resident = resident
        self._placed: Splits | None = None
        self._label_checks: dict[str, LabelCheck] = {}  # by split, for a model that classifies
        self._scales: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._parameter: Tensor | None = None  # one of the module's parameters; images get its dtype

    def setup(self, stage: str) -> None:
        """Copy data sets in memory to the GPU, if the run uses one, before loaders are made."""
        assert self.trainer is not None
        # Search once: a search for each batch would take longer than the preparation of the batch.
        self._parameter = next((p for p in self._module.parameters() if p.is_floating_point()), None)
        if getattr(self._module, "task", None) == "classification" and stage != "predict":
            self._label_checks = {
                name: check for name, check in label_checks(self.splits).items() if not in_memory(check.dataset)
            }
        device = self.trainer.strategy.root_device
        if self._placed is None and device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            self._placed = place_on_device(self.splits, device, self.resident, free)
            if self._placed is not self.splits and self.rank == 0:
                LOG.info("data sets in memory were copied to the GPU")

    @cached_property
    def labels(self) -> Ids:
        """The labels of the training samples, int64 [n], in the data set's order. Raises what `labels_of` raises."""
        return self.splits.train_labels()

    def labels_of_step(self, step_batch: StepBatch) -> Ids:
        """Return the labels of all samples of a step, over all processes, int64 [n]; see `labels`."""
        return self.labels[self.order.step(*self.order.position(step_batch.step))]

    def _dataset_of(self, split: str) -> Any:
        return getattr(self._placed or self.splits, split)

    def _label_check(self, split: str) -> LabelCheck | None:
        return self._label_checks.get(split)

    @property
    def _augment(self) -> Augment:
        augment: Augment = self.splits.augment
        return augment

    def piece(self, split: str) -> Any:
        """Return a piece-sized batch of the first samples of `train` or `test`, prepared for the module's steps."""
        dataset = ChunkDataset(self._dataset_of(split))
        batch = dataset.__getitems__(range(min(self.layout.piece_size, len(dataset))))
        assert self.trainer is not None
        device = self.trainer.strategy.root_device
        return self.on_after_batch_transfer(self.transfer_batch_to_device(batch, device, 0), 0)

    @property
    def mixes(self) -> bool:
        """True if a piece's samples are mixed."""
        return bool(self.splits.mix)

    def mix(self, batch: Any) -> Any:
        """Return a piece's batch with its samples mixed: `y` is then [n, classes], in the dtype of `x`."""
        x, y, *rest = batch
        x, y = self.splits.mix(x, y)
        return (x, y.to(x.dtype), *rest)

    def _prepared(self, batch: Any, augmentation_numbers: Tensor | None = None) -> Any:
        """Return a batch with its images augmented, if there are `augmentation_numbers`, and normalised."""
        if not isinstance(batch, tuple | list) or not isinstance(batch[0], Tensor):
            return batch  # a dict, for example: the module prepares it
        x, *rest = batch
        if augmentation_numbers is not None:
            x = self.splits.augment(x, augmentation_numbers)
            if self.splits.spec.task == "segmentation":
                rest[0] = self.splits.augment(rest[0][:, None], augmentation_numbers, UNLABELLED)[:, 0]
        dtype = torch.get_default_dtype() if self._parameter is None else self._parameter.dtype
        if x.dtype == torch.uint8:
            x = self._normalise(x, dtype)
        elif x.is_floating_point():
            # Copy it: a view of a larger tensor may begin at any address, and MKL and CUDA choose some kernels by the
            # alignment of their input. Another kernel may round differently.
            x = x.to(dtype, copy=True)
        return (x, *rest)

    def _normalise(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        key = images.device, dtype
        if key not in self._scales:
            moments = self.splits.spec.mean, self.splits.spec.std
            mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in moments)
            self._scales[key] = (1 / (255 * std)).to(*key, True), (-mean / std).to(*key, True)  # True: non-blocking
        scale, shift = self._scales[key]
        # Two operations, because a fused one may round differently in a kernel's vectorised body and its scalar tail.
        return images.to(dtype).mul_(scale).add_(shift)


def place_on_device(splits: Splits, device: torch.device, choice: bool | str, free: float) -> Splits:
    """Return splits with their data sets in memory copied to `device`, each once. Others stay on the host.

    Only objects of the class `ArrayDataset` itself are copied, since a derived class may use its arrays in other ways.

    Args:
        choice: `speed.resident`: false, true or auto. With auto, data sets that take more than half of the free memory
            stay on the host, since the model needs memory, too.
        free: free bytes on the device.

    Raises:
        UserError: `choice` is true, and no data set is in memory, or they do not fit on the device.
    """
    if choice is False:
        return splits
    parts = {"train": splits.train, "val": splits.val, "test": splits.test}
    innermost = map(innermost_dataset, parts.values())
    in_memory = {id(dataset): dataset for dataset in innermost if type(dataset) is ArrayDataset}
    size = sum(dataset.images.nbytes + dataset.labels.nbytes for dataset in in_memory.values())
    if choice is True and not in_memory:
        raise UserError("speed.resident=true: no data set is in memory as an ArrayDataset: use speed.resident=auto")
    sizes = f"the data sets take {size / MIB:.0f} MiB, and {device} has {free / MIB:.0f} MiB free"
    if choice is True and size > free:
        raise UserError(f"speed.resident=true: {sizes}: use speed.resident=false")
    if choice == "auto" and size > free / 2:
        LOG.info("%s: they stay on the host (speed.resident=true copies them, if they fit)", sizes)
        return splits
    resident: dict[int, Any] = {key: Resident(dataset, device) for key, dataset in in_memory.items()}
    return replace(splits, **{name: _moved(part, resident) for name, part in parts.items()})


def _moved(dataset: Any, resident: dict[int, Any]) -> Any:
    if type(dataset) is Subset:
        return Subset(_moved(dataset.dataset, resident), dataset.indices)
    return resident.get(id(dataset), dataset)


def _set_up_loader_process(parent: int, start: Callable[[int], None] | None, worker: int) -> None:
    """Set up a loader process: it ignores signals to the process group, ends with its parent, and calls `start`.

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
        start(worker)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error unless it is a lost connection: the thread that sends tensors gets one if the parent has died."""
    if not issubclass(kind, ConnectionError):
        sys.__excepthook__(kind, error, trace)


def _identity(batch: Any) -> Any:
    """Return the batch: the data set has collated it already."""
    return batch
