"""Count the kernels that code would start on a GPU, on the CPU."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# operations that start no kernel: views, and memory without content
FREE = {
    *("view", "detach", "t", "transpose", "as_strided", "expand", "permute", "select", "slice", "unsqueeze", "squeeze"),
    *("split", "split_with_sizes", "unbind", "alias", "_unsafe_view", "_reshape_alias", "unfold", "lift_fresh", "set_"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "is_pinned", "sym_size"),
    *("record_stream", "_has_compatible_shallow_copy_type", "_local_scalar_dense"),
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
        """The operations that start a kernel."""
        return sum(count for name, count in self.seen.items() if name not in FREE)

    @property
    def host_reads(self) -> int:
        """How often the host has read a number, for which it would wait for a GPU."""
        return self.seen["_local_scalar_dense"]
