"""What a loader yields, one process's part of one optimizer step, and the interface of the data module."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from numpy.typing import NDArray
from torch import Tensor

from lockstep.arithmetic.layout import Assignment, Layout
from lockstep.arithmetic.order import DataOrder
from lockstep.errors import UserError

Versions = list[tuple[Tensor, int]]


@dataclass(slots=True, eq=False)
class MicroBatch:
    """A piece of a step: one forward and backward pass on one device.

    Attributes:
        ids: the samples' ids in the training set, int64 [n], at least one. They stay on the host.
        device: number of the device that computes it, over all nodes.
        piece: its number in the step.
        epochs_and_repeats: the number for each sample that makes its random numbers differ between its uses, int64 [n]:
            in the lower 32 bits the epoch, in the upper how often this epoch has used the sample before (0, except with
            balanced sampling).
        batch: the collated samples as the data set returns them; of images `(uint8 [n, C, H, W], int64 [n])`.
        augmentation_numbers: random numbers in [0, 1) for `Augment`, float32 [n, k]; None without augmentation.
    """

    ids: NDArray[np.int64]
    device: int
    piece: int
    epochs_and_repeats: NDArray[np.int64]
    batch: Any = None
    augmentation_numbers: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.ids)


@dataclass(slots=True, eq=False)
class StepBatch:
    """One process's part of one optimizer step.

    Attributes:
        micro_batches: the micro-batches of this process that have a sample. It may be empty if a short last step has
            fewer samples than processes.
        samples: samples of the whole step, over all processes.
        num_nonempty: pieces of the whole step that have a sample.
        epoch: 0-based.
        step: the number of the optimizer step since the run began, 0-based.
        all_ranks_have_data: whether every process has a sample in this step.
        most_micro_batches: the number of micro-batches of the process that has most of them.
        weight: the sum of the weights that `training_step` returned, over all processes; None without weights. Set
            during the step.
        skipped: whether the gradient was not finite and the step was skipped (`nonfinite=skip`). Set during the step.
        put_together: makes one batch of this process's samples, as `training_step` gets them. Hooks that use a
            `StepBatch` as a batch (`x, y = batch`, `batch["x"]`, `len(batch)`) get its result. Set before the step.
        returned: the numbers that `training_step` has returned for each micro-batch. Set during the step.
    """

    micro_batches: list[MicroBatch]
    samples: int
    num_nonempty: int
    epoch: int
    step: int
    all_ranks_have_data: bool
    most_micro_batches: int = 0
    weight: float | None = None
    skipped: bool = False
    returned: list[dict[str, Tensor]] = field(default_factory=list)
    put_together: Callable[[], Any] | None = field(default=None, repr=False)
    _together: tuple[Any, Versions] | None = field(default=None, repr=False)  # its result, and that of `_versions`

    @property
    def together(self) -> Any:
        """This process's samples of the step as one batch, made when it is first asked for."""
        if self._together is None:
            if self.put_together is None:
                raise UserError("this StepBatch belongs to no step: its samples are in micro_batches")
            batch = self.put_together()
            self._together = batch, _versions(batch)
        return self._together[0]

    @property
    def was_changed(self) -> bool:
        """Whether a hook has changed a tensor of `together`, in place or by another one in its place."""
        if self._together is None:
            return False
        batch, before = self._together
        now = _versions(batch)
        same = [a is b and version == other for (a, version), (b, other) in zip(before, now, strict=False)]
        return len(before) != len(now) or not all(same)

    def __iter__(self) -> Any:
        """Iterate `together`."""
        return iter(self.together)

    def __len__(self) -> int:
        """Return the length of `together`."""
        return len(self.together)

    def __bool__(self) -> bool:
        """Return True, without making `together`."""
        return True

    def __getitem__(self, key: Any) -> Any:
        """Return an item of `together`."""
        return self.together[key]

    def __contains__(self, key: Any) -> bool:
        """Check whether `together` has a key."""
        return key in self.together

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of `together`, such as `keys` or `shape`."""
        if name.startswith("_") or self.put_together is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.together, name)

    @property
    def num_local_samples(self) -> int:
        """Number of samples that this process computes."""
        return sum(micro_batch.size for micro_batch in self.micro_batches)

    def to(self, device: torch.device) -> "StepBatch":
        """Return a copy with its tensors on `device`."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "StepBatch":
        """Return a copy with its tensors in page-locked memory, from which a GPU copies asynchronously.

        Tensors that are on a GPU already stay there.
        """
        return self._moved(lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> "StepBatch":
        tensors = [(each.batch, each.augmentation_numbers) for each in self.micro_batches]
        pairs = zip(self.micro_batches, apply_to_collection(tensors, Tensor, move), strict=True)
        micro_batches = [replace(each, batch=batch, augmentation_numbers=numbers) for each, (batch, numbers) in pairs]
        return replace(self, micro_batches=micro_batches)


def _versions(batch: Any) -> Versions:
    """Return a batch's tensors, each with the number of its in-place changes."""
    versions: Versions = []
    apply_to_collection(batch, Tensor, lambda tensor: versions.append((tensor, tensor._version)))  # in containers, too
    return versions


def copied(batch: Any) -> Any:
    """Return a batch with copies of its tensors, also of those that an object of a user's own class has.

    For passes and hooks beside those of the step: what they write into the batch must not reach it.
    """
    made = apply_to_collection(batch, Tensor, Tensor.clone)
    if made is batch and not isinstance(batch, Mapping | Sequence) and hasattr(batch, "__dict__"):
        made = copy(batch)
        vars(made).update(apply_to_collection(dict(vars(batch)), Tensor, Tensor.clone))
    return made


class CannotJoin(Exception):
    """Parts of pieces can't be put together."""


def joined(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the parts of several pieces as one, in the order of the pieces.

    Args:
        parts: of each piece a tensor with one row for each sample, a list with one element for each, or a container of
            such; or what is the same for all pieces.
        sizes: the samples of each piece.

    Raises:
        CannotJoin: they are something else.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(type(part) is not type(first) for part in parts):
        raise CannotJoin
    if isinstance(first, Tensor):
        if all(part.ndim and len(part) == size for part, size in zip(parts, sizes, strict=True)):
            if len({(part.shape[1:], part.dtype) for part in parts}) == 1:
                return torch.cat(list(parts))
        elif all(part.shape == first.shape and torch.equal(part, first) for part in parts):
            return first
        raise CannotJoin
    if isinstance(first, Mapping):
        if any(part.keys() != first.keys() for part in parts):
            raise CannotJoin
        values = {key: joined([part[key] for part in parts], sizes) for key in first}
        return values if type(first) is dict else type(first)(values)  # type: ignore[call-arg]
    if isinstance(first, list | tuple):
        by_sample = [len(part) for part in parts] == list(sizes)
        columns_have_rows = all(_rows(each, len(first)) for each in first)
        if len({len(part) for part in parts}) == 1 and (columns_have_rows or not by_sample):
            with suppress(CannotJoin):
                columns = [joined(column, sizes) for column in zip(*parts, strict=True)]
                return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
        if by_sample:
            return type(first)(each for part in parts for each in part)
        raise CannotJoin
    if all(part is first or (isinstance(first, bool | int | float | str | bytes) and part == first) for part in parts):
        return first
    raise CannotJoin


def _rows(value: Any, size: int) -> bool:
    """Check whether a value has one row for each of `size` samples."""
    if isinstance(value, Mapping):
        return all(_rows(each, size) for each in value.values())
    if isinstance(value, Tensor):
        return value.ndim > 0 and len(value) == size
    return isinstance(value, list | tuple) and len(value) == size


class CannotRepeat(Exception):
    """A batch has a part of which the samples are unknown."""


def repeated(batch: Any, size: int, rows: range, times: int = 1) -> Any:
    """Return some samples of a batch, repeated.

    Args:
        batch: tensors with one row per sample, lists of other things with one for each sample, and containers of them.
            Numbers, strings and tensors of one element stay as they are.
        size: samples of the batch.
        rows: the positions of the samples that are repeated.
        times: how often they stand in the result.

    Raises:
        CannotRepeat: something has no part for each sample.
    """
    if isinstance(batch, Tensor):
        if batch.ndim and len(batch) == size:
            part = batch[rows.start : rows.stop] if rows.step == 1 else batch[list(rows)]
            return torch.cat([part] * times)
        if batch.numel() == 1:
            return batch
        raise CannotRepeat(f"a tensor of shape {list(batch.shape)} is not one row for each of {size} samples")
    if isinstance(batch, Mapping):
        changed = {key: repeated(value, size, rows, times) for key, value in batch.items()}
        return changed if type(batch) is dict else type(batch)(changed)  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        by_sample = len(batch) == size and all(not isinstance(each, Tensor | Mapping | list | tuple) for each in batch)
        if by_sample and size > 1:
            return type(batch)([batch[row] for row in rows] * times)
        changed_parts = [repeated(value, size, rows, times) for value in batch]
        return type(batch)(*changed_parts) if hasattr(batch, "_fields") else type(batch)(changed_parts)
    if batch is None or isinstance(batch, bool | int | float | str | bytes):
        return batch
    raise CannotRepeat(f"the samples of a {type(batch).__name__} are unknown")


class EvaluationShare(NamedTuple):
    """The part of an evaluation set that one process evaluates. Both numbers are 0 if there are too few samples."""

    batches: int
    samples: int


class StepData(Protocol):
    """What a step needs of its data. `lockstep.data.StepData` implements it, in a room above this one.

    Attributes:
        layout: the run's layout.
        assignment: assigns the pieces of each step to devices.
        order: the order of the training samples.
    """

    layout: Layout
    assignment: Assignment
    order: DataOrder

    @property
    def mixes(self) -> bool:
        """True if a piece's samples are mixed."""

    def mix(self, batch: Any) -> Any:
        """Return a piece's batch with its samples mixed."""

    def prepare(self, micro_batch: MicroBatch) -> Any:
        """Return the batch of a micro-batch for `training_step`: augmented and normalised."""

    def fetch_piece(self, step_batch: StepBatch, piece: int, device: int) -> MicroBatch:
        """Fetch one piece of a step. `device` is one of this process; devices are counted over all nodes."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to a device."""

    def transfer_hook(self, name: str) -> Callable[..., Any] | None:
        """Return the user's hook of the transfer of a batch with this name; None if there is none."""

    def num_local_samples(self, split: str) -> int:
        """Return the number of samples of `val` or `test` that this process evaluates."""

    def samples_of_batch(self, split: str, batch_idx: int) -> int:
        """Return the number of samples of a batch of `val` or `test` that this process evaluates."""

    def evaluation_shares(self, split: str) -> tuple[EvaluationShare, ...]:
        """Return what each process evaluates of `val` or `test`, in rank order."""

    def evaluation_splits(self, part: str) -> list[str]:
        """Return the names of the splits that the loaders of `val` or `test` read."""


def split_of_loader(part: str, number: int | None) -> str:
    """Return the name of the split that a loader of an evaluation reads: of one of several, `val.1`, say.

    Args:
        part: `val` or `test`.
        number: the loader's `dataloader_idx`; None: there is one loader, or all of them are meant.
    """
    return part if number is None else f"{part}.{number}"


def evaluated_split(trainer: Any) -> str:
    """Return the name of the split that a trainer evaluates now; see `split_of_loader`."""
    part = "test" if trainer.testing or trainer.predicting else "val"
    return split_of_loader(part, trainer.evaluated_loader)


def data_of(trainer: Any) -> StepData:
    """Return a trainer's data module."""
    data: StepData = trainer.datamodule
    return data
