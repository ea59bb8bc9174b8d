"""Sets in memory, put on the GPU once: batches are then gathered there, and what travels are the samples' ids."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from lockstep.config.value_checks import show
from lockstep.data.datasets import ArrayDataset, Ids, Splits, innermost_dataset
from lockstep.errors import UserError

MIB = 1 << 20


class Resident(ArrayDataset):
    """A set in memory whose images and labels lie on `device`. A batch is gathered there, and has the same bits."""

    draws = False

    def __init__(self, dataset: ArrayDataset, device: torch.device) -> None:
        self.images, self.labels = dataset.images.to(device), dataset.labels.to(device)

    def __getitems__(self, ids: Sequence[int] | Ids) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(ids, dtype=torch.int64)
        if self.images.is_cuda:  # from page-locked memory, else the host would wait for the copy
            index = index.pin_memory().to(self.images.device, non_blocking=True)
        return self.images.index_select(0, index), self.labels.index_select(0, index)


def place_on_device(splits: Splits, device: torch.device, choice: bool | str, free: float) -> Splits:
    """The splits with their sets in memory on `device`, each once; others stay where they are.

    Only plain `ArrayDataset`s are moved: what a class of the user's own does with its arrays is not known.

    Args:
        choice: `speed.resident` of the config: false, true, or auto, which asks for no set in memory.
        free: bytes that may be used on the device.

    Raises:
        UserError: nothing is in memory though true asks for it, or the sets are larger than the memory.
    """
    if choice is False:
        return splits
    parts = {name: getattr(splits, name) for name in ("train", "val", "test")}
    in_memory = {
        id(innermost_dataset(part)): innermost_dataset(part)
        for part in parts.values()
        if type(innermost_dataset(part)) is ArrayDataset
    }
    size = sum(dataset.images.nbytes + dataset.labels.nbytes for dataset in in_memory.values())
    if choice is True and not in_memory:
        raise UserError("speed.resident=true: no set of this data is in memory, as an ArrayDataset; resident=auto")
    if size > free:
        sizes = f"the sets take {size / MIB:.0f} MiB, and {device} has {free / MIB:.0f} free"
        raise UserError(f"speed.resident={show(choice)}: {sizes}: resident=false")
    resident: dict[int, Any] = {key: Resident(dataset, device) for key, dataset in in_memory.items()}
    return replace(splits, **{name: _moved(part, resident) for name, part in parts.items()})


def _moved(dataset: Any, resident: dict[int, Any]) -> Any:
    if type(dataset) is Subset:
        return Subset(_moved(dataset.dataset, resident), dataset.indices)
    return resident.get(id(dataset), dataset)
