"""Data sets in memory, copied to the GPU once. Batches are then gathered there, and only sample ids are sent."""

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
    """A data set in memory whose images and labels are on `device`. Batches are gathered there, with the same bits."""

    uses_random_numbers = False

    def __init__(self, dataset: ArrayDataset, device: torch.device) -> None:
        self.images, self.labels = dataset.images.to(device), dataset.labels.to(device)

    def __getitems__(self, ids: Sequence[int] | Ids) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(ids, dtype=torch.int64)
        if self.images.is_cuda:  # pinned memory: without it, the host would wait for the copy
            index = index.pin_memory().to(self.images.device, non_blocking=True)
        return self.images.index_select(0, index), self.labels.index_select(0, index)


def place_on_device(splits: Splits, device: torch.device, choice: bool | str, free: float) -> Splits:
    """Return splits with their data sets in memory copied to `device`, each once. Others stay on the host.

    Only objects of the class `ArrayDataset` itself are copied, since a derived class may use its arrays in other ways.

    Args:
        choice: `speed.resident`: false, true or auto. Only true requires that a data set is in memory.
        free: free bytes on the device.

    Raises:
        UserError: no data set is in memory although `choice` is true, or they do not fit on the device.
    """
    if choice is False:
        return splits
    parts = {"train": splits.train, "val": splits.val, "test": splits.test}
    innermost = map(innermost_dataset, parts.values())
    in_memory = {id(dataset): dataset for dataset in innermost if type(dataset) is ArrayDataset}
    size = sum(dataset.images.nbytes + dataset.labels.nbytes for dataset in in_memory.values())
    if choice is True and not in_memory:
        raise UserError("speed.resident=true: no data set is in memory as an ArrayDataset: use speed.resident=auto")
    if size > free:
        sizes = f"the data sets take {size / MIB:.0f} MiB, and {device} has {free / MIB:.0f} MiB free"
        raise UserError(f"speed.resident={show(choice)}: {sizes}: use speed.resident=false")
    resident: dict[int, Any] = {key: Resident(dataset, device) for key, dataset in in_memory.items()}
    return replace(splits, **{name: _moved(part, resident) for name, part in parts.items()})


def _moved(dataset: Any, resident: dict[int, Any]) -> Any:
    if type(dataset) is Subset:
        return Subset(_moved(dataset.dataset, resident), dataset.indices)
    return resident.get(id(dataset), dataset)
