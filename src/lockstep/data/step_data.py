"""`StepData` gives the samples of a piece: by the loaders of one process, prepared as a batch on its device."""

import logging
import os
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import Subset

from lockstep.arithmetic.layout import Assignment, Layout
from lockstep.arithmetic.streams import StreamOrder
from lockstep.data.datasets import UNLABELLED, ArrayDataset, Ids, innermost_dataset
from lockstep.data.labels import NAMES, SampleCheck, in_memory, sample_checks
from lockstep.data.loaders import (
    Chunk,
    ChunkDataset,
    ChunkSampler,
    Loader,
    StepDataset,
    StepSampler,
    chunks_of_rank,
    gains_from_loader_processes,
    identity,
    limited,
    set_up_loader_process,
)
from lockstep.data.repeats import Repeats
from lockstep.data.splits import LOADERS, NO_IMAGES, Split, Splits
from lockstep.errors import UserError
from lockstep.launch.machine import cores_per_worker, most_loader_processes
from lockstep.launch.process_lifetime import refuse_daemon
from lockstep.lightning.hooks import overrides_method
from lockstep.lightning.private_names import take_identity
from lockstep.step.batch import EvaluationShare, MicroBatch, StepBatch

LOG = logging.getLogger("lockstep")
MIB = 1 << 20
READ_BY = {name: part for names in LOADERS.values() for part, name in names.items()}  # the loaders of a loop: the part


class StepData(pl.LightningDataModule):
    """The samples of each piece, for one process: its training batches are `StepBatch`es.

    Images are augmented and normalised on the device, a batch at a time. Other samples are used as the data sets return
    them. A user's own data module stands behind it: attributes that are not found here are those of the user's, and its
    hooks are called.

    Args:
        splits: the open data: from a config (`data/build.py`) or from a user's loaders (`data/user_data.py`).
        layout: assigns pieces to devices.
        seed: the run's seed. The order of samples and their random numbers depend on it.
        rank: this process's number among `layout.replicas`.
        num_workers: loader processes of this process, `most_loader_processes` at most. None: none for data sets in
            memory, else the machine's cores divided by its number of ranks, at least 1 and at most 8.
        resident: whether data sets in memory are copied to the GPU: true, false or auto; see `place_on_device`.
        trains: whether this is a training run. If not, `batch_size` was chosen for an evaluation.

    Attributes:
        order: the order of the training samples.
        assignment: assigns the pieces of each step to devices, as `layout` does.
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
    ) -> None:
        self.owner = None if isinstance(splits.owner, pl.LightningModule) else splits.owner
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True  # a process may have no sample to predict
        self.splits, self.layout, self.rank, self.resident, self.trains = splits, layout, rank, resident, trains
        most = most_loader_processes(layout.world_size // layout.num_nodes)
        if num_workers is not None and num_workers > most:
            if rank == 0:
                can_use = "more than this machine's cores can use, so each worker has"
                LOG.warning("num_workers=%d: %s %d", num_workers, can_use, most)
            num_workers = most
        self.num_workers = num_workers
        self.assignment = Assignment(layout)
        self.order = splits.order(layout, seed)
        self._has_images = splits.spec != NO_IMAGES
        self._shares: dict[Any, tuple[EvaluationShare, ...]] = {}  # by split and the samples that are evaluated
        self._chunks_of: dict[Any, list[Chunk]] = {}  # by split, rank, samples, and those that are evaluated
        self._placed: Splits | None = None  # with data sets on the GPU
        self._checks: dict[str, SampleCheck] = {}  # by split
        self._scales: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._parameter: Tensor | None = None  # one of the module's parameters; images get its dtype
        if isinstance(self.owner, pl.LightningDataModule):
            take_identity(self, self.owner)
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; one that is not ours, as a hook does by `trainer.datamodule.level = 1`, is the user's."""
        ours = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if ours or "_is_made" not in self.__dict__ or not isinstance(self.owner, pl.LightningDataModule):
            super().__setattr__(name, value)
        else:
            setattr(self.owner, name, value)

    def __getattr__(self, name: str) -> Any:
        owner = self.__dict__.get("owner")
        if owner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(owner, name)

    def setup(self, stage: str) -> None:
        """Copy data sets in memory to the GPU, if the run uses one, before loaders are made."""
        if not self._has_images:
            return
        assert self.trainer is not None
        # Search once: a search for each batch would take longer than the preparation of the batch.
        self._parameter = next((p for p in self._module.parameters() if p.is_floating_point()), None)
        if stage != "predict":
            checks = sample_checks(self.splits, getattr(self._module, "task", None) == "classification")
            self._checks = {name: check for name, check in checks.items() if not in_memory(check.dataset)}
        device = self.trainer.strategy.root_device
        if self._placed is None and device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            self._placed = place_on_device(self.splits, device, self.resident, free)
            if self._placed is not self.splits and self.rank == 0:
                LOG.info("data sets in memory were copied to the GPU")

    @property
    def _module(self) -> pl.LightningModule:
        assert self.trainer is not None
        return self.trainer.lightning_module

    def _split(self, name: str) -> Split:
        return (self._placed or self.splits).split(name)

    def labels_of_step(self, step_batch: StepBatch) -> Ids:
        """Return the labels of all samples of a step, over all processes, int64 [n]; raise what `labels_of` raises."""
        return self._labels[self.order.step(*self.order.position(step_batch.step))]

    @cached_property
    def _labels(self) -> Ids:
        return self.splits.train_labels()

    # --- loaders: Lightning's loops call `loader_of_loop`, and users get what they gave ---

    def train_dataloader(self) -> Any:
        """Return the user's loader, or else that of an epoch's remaining steps."""
        return self._of_user("train_dataloader")

    def val_dataloader(self) -> Any:
        """Return the user's loader, or else that of this process's samples; an empty list without a validation set."""
        return self._of_user("val_dataloader")

    def test_dataloader(self) -> Any:
        """Return the user's loader, or else that of this process's test samples."""
        return self._of_user("test_dataloader")

    def predict_dataloader(self) -> Any:
        """Return the user's loader, or else that of this process's part of the test set; the part may be empty."""
        return self._of_user("predict_dataloader")

    def _of_user(self, name: str) -> Any:
        is_module = isinstance(self.owner, pl.LightningDataModule)
        return getattr(self.owner, name)() if is_module else self.users_loader(name)

    def users_loader(self, name: str) -> Any:
        """Return what the user gave for the loaders that a loop reads; ours if there are none."""
        splits = [self._split(split) for split in self.evaluation_splits(READ_BY[name])]
        is_users = bool(splits) and all(each.loader is not None for each in splits)
        return splits[0].whole if is_users else self.loader_of_loop(name)

    def loader_of_loop(self, name: str) -> Any:
        """Return the loader of one of Lightning's loops; a list if there is no loader, or several."""
        part = READ_BY[name]
        if part == "train":
            sampler = StepSampler(self.order, partial(getattr, self.trainer, "global_step"))
            loader = self._split(part).loader
            keeps = loader is None or loader.persistent_workers  # else hooks between epochs may change the data set
            return self._loader(self._steps(), sampler, part, keep_workers=keeps)
        if part == "val" and self.splits.val is None:
            return []
        min_batches = 0 if name == "predict_dataloader" else 1
        loaders = [self._evaluation(split, min_batches) for split in self.evaluation_splits(part)]
        if part == "val":
            for loader in loaders:
                loader.sanity_batches = self._sanity_batches
        return loaders[0] if len(loaders) == 1 else loaders

    def _sanity_batches(self) -> float:
        checks = getattr(self.trainer, "sanity_checking", False)
        return self.trainer.num_sanity_val_steps if checks else 0  # type: ignore[union-attr]

    def _steps(self) -> StepDataset:
        dataset, check = self._split("train").dataset, self._checks.get("train")
        augment = self.splits.augment
        return StepDataset(dataset, self.order, self.rank, augment, self.assignment, check, self._stop_step)

    @property
    def _stop_step(self) -> int | None:
        """The number of steps after which the run ends; None: it has no limit, or no shards to announce until then."""
        if not isinstance(self.order, StreamOrder):
            return None
        trainer: Any = self.trainer
        epochs = trainer.max_epochs
        limits = [trainer.max_steps, -1 if epochs is None else epochs * self.order.steps_per_epoch]
        return min((limit for limit in limits if limit >= 0), default=None)

    def evaluation_splits(self, part: str) -> list[str]:
        """Return the names of the splits that the loaders of `val` or `test` read."""
        return self.splits.names(part)

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

    def _evaluation(self, name: str, min_batches: int = 1) -> Loader:
        split, chunks = self._split(name), self._chunks(name, self.rank) or [(0, 1)] * min_batches
        ids = None if split.draws is None else split.draws.ids(0)
        repeats = Repeats(NAMES[name.partition(".")[0]], self.layout.exact, self.rank == 0)
        check = self._checks.get(name)
        checked = ChunkDataset(split.dataset, check, chunks, repeats if split.stream is None else None)
        return self._loader(checked, ChunkSampler(chunks, ids), name)

    def _chunks(self, name: str, rank: int) -> list[Chunk]:
        split, most = self._split(name), self._most(name)
        key = name, rank, split.samples, most
        if key not in self._chunks_of:  # each batch of an evaluation asks
            samples, size = split.samples, split.batch_sizes
            self._chunks_of[key] = chunks_of_rank(samples, self.layout, rank, self.trains, size, most)
        return self._chunks_of[key]

    def _most(self, name: str) -> int:
        """Return how many samples of `val` or `test` are evaluated, over all processes: its batches may be limited."""
        part = "predict" if getattr(self.trainer, "predicting", False) else name.partition(".")[0]
        option, split = f"limit_{part}_batches", self._split(name)
        limit = getattr(self.trainer, "limits", {}).get(option, getattr(self.trainer, option, None))
        return limited(split.samples, split.batch_sizes or self.layout.batch_size, limit, option)

    def _loader(self, dataset: Any, sampler: Any, name: str, keep_workers: bool = False) -> Loader:
        split, source = self._split(name), innermost_dataset(dataset.dataset)
        resident = type(source) is ArrayDataset and source.resident
        # of a step, the random numbers are on the host, even if its images are on the GPU
        pinned = not resident or isinstance(dataset, StepDataset)
        workers = self.num_workers if split.num_workers is None else split.num_workers
        workers = 0 if resident else workers  # a loader process would have to read from the GPU
        if workers is None and gains_from_loader_processes(dataset.dataset):
            workers = min(8, cores_per_worker(self.layout.world_size // self.layout.num_nodes))
        if workers:
            refuse_daemon(f"num_workers={workers}", "give num_workers=0")
        return Loader(
            dataset,
            batch_sampler=sampler,
            num_workers=workers or 0,
            collate_fn=identity,
            pin_memory=self.layout.accelerator == "gpu" and torch.cuda.is_available() and pinned,
            persistent_workers=keep_workers and bool(workers),
            # Python 3.14 starts loader processes from a server process by default, but `set_parent_death_signal` works
            # only if this process is their parent.
            multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
            # Each iterator draws a seed from this generator. Drawn from torch's global one, it would change all later
            # random numbers.
            generator=torch.Generator().manual_seed(self.order.seed),
            worker_init_fn=partial(set_up_loader_process, os.getpid(), split.starts_worker, split.loader),
        )

    # --- on the device ---

    def fetch_piece(self, step_batch: StepBatch, piece: int, device: int) -> MicroBatch:
        """Fetch one piece of a step for the device with this index, which counts the devices of all nodes."""
        fetched = self._steps().fetch_piece(step_batch, piece, device)
        assert self.trainer is not None
        return self.transfer_batch_to_device(fetched, self.trainer.strategy.root_device, 0).micro_batches[0]

    def transfer_hook(self, name: str) -> Callable[..., Any] | None:
        """Return the user's hook of the transfer of a batch with this name; None if there is none.

        As Lightning chooses, that of the data module comes first.
        """
        owners = [self.owner] if isinstance(self.owner, pl.LightningDataModule) else []
        for each in (*owners, self._module):
            if overrides_method(each, name, pl.LightningModule):
                hook: Callable[..., Any] = getattr(each, name)
                return hook
        return None

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

    def piece(self, split: str) -> Any:
        """Return a piece-sized batch of the first samples of `train` or `test`, prepared for the module's steps."""
        dataset = ChunkDataset(self._split(split).dataset)
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
        """Return a batch with its images augmented, if there are `augmentation_numbers`, and normalised.

        Floating-point tensors are copied: a view of a larger tensor may begin at any address, and MKL and CUDA choose
        some kernels by the alignment of their input. Another kernel may round differently.
        """
        if not self._has_images:
            assert self.trainer is not None
            return self.trainer.precision_plugin.convert_input(apply_to_collection(batch, Tensor, _copied))
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

    # --- what belongs to a user's LightningDataModule ---

    def _call(self, name: str, *args: Any) -> Any:
        return getattr(self.owner, name)(*args) if isinstance(self.owner, pl.LightningDataModule) else None

    def teardown(self, stage: str) -> None:
        """Call the user's `teardown`."""
        self._call("teardown", stage)

    def on_exception(self, exception: BaseException) -> None:
        """Call the user's `on_exception`."""
        self._call("on_exception", exception)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's data module."""
        return self._call("state_dict") or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the user's data module."""
        self._call("load_state_dict", state_dict)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_floating_point() else tensor


def place_on_device(splits: Splits, device: torch.device, choice: bool | str, free: float) -> Splits:
    """Return splits with their data sets in memory copied to `device`, each once. Others stay on the host.

    Only objects of the class `ArrayDataset` itself are copied, since a derived class may use its arrays in other ways.

    Args:
        choice: `speed.resident`: false, true or auto. With auto, data sets that take more than half of the free memory
            stay on the host, since the model needs memory, too.
        free: free bytes on the device.
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
    resident: dict[int, Any] = {key: _on_device(dataset, device) for key, dataset in in_memory.items()}
    return replace(splits, **{name: _moved(part, resident) for name, part in parts.items()})


def _on_device(dataset: ArrayDataset, device: torch.device) -> ArrayDataset:
    other = copy(dataset)
    other.images, other.labels, other.resident = dataset.images.to(device), dataset.labels.to(device), True
    return other


def _moved(dataset: Any, resident: dict[int, Any]) -> Any:
    if type(dataset) is Subset:
        return Subset(_moved(dataset.dataset, resident), dataset.indices)
    return resident.get(id(dataset), dataset)
