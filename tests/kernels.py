"""Count the kernels that code would start on a GPU, and where it would wait for one, on the CPU."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# operations that start no kernel: views, and memory without content
FREE = {
    *("view", "detach", "t", "transpose", "as_strided", "expand", "permute", "select", "slice", "unsqueeze", "squeeze"),
    *("split", "split_with_sizes", "unbind", "alias", "_unsafe_view", "_reshape_alias", "unfold", "lift_fresh", "set_"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "is_pinned", "sym_size"),
    *("record_stream", "_has_compatible_shallow_copy_type", "_local_scalar_dense", "promote_types"),
    *("profiler::_record_function_enter_new", "profiler::_record_function_exit"),
}


class Kernels(TorchDispatchMode):
    """Count operations inside the `with` block.

    Attributes:
        seen: how often each operation was called, by its name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket._qualified_op_name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))

    @property
    def kernels(self) -> int:
        """Return the operations that start a kernel."""
        return sum(count for name, count in self.seen.items() if name not in FREE)


# calls by which the host reads a tensor
READING = {
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.nonzero, Tensor.unique, Tensor.equal),
    *(Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__),
}


class HostReads(TorchFunctionMode):
    """Count inside the `with` block how often the host reads a tensor; of tensors that are always on the CPU too.

    Attributes:
        seen: how often each line has read, as `file.py:line`. A line of torch or Lightning counts for its caller.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        overrides = kwargs or {}  # a copy that is asynchronous waits for nothing
        is_copy = func is Tensor.to and "cpu" in map(str, (*args[1:], *overrides.values()))
        if func in READING or (is_copy and not overrides.get("non_blocking")):
            frame = sys._getframe(1)
            while frame.f_back is not None and "site-packages" in frame.f_code.co_filename:
                frame = frame.f_back
            self.seen[f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"] += 1
        return func(*args, **(kwargs or {}))
