"""How much memory steps take on a CPU, where no allocator counts it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that live in this process, as a GPU's allocator does; what a kernel takes for
    itself while it runs is not seen.

    Attributes:
        used, peak: bytes, now and at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else (out,):
            if isinstance(part, Tensor):
                self._count(part)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def freed(_: Any) -> None:
            del self._storages[key]
            self.used -= size

        self._storages[key] = weakref.ref(storage, freed)  # torch keeps this object as long as the memory
        self.used += size
        self.peak = max(self.peak, self.used)
