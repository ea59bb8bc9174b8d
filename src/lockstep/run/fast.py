"""The fast path, chosen per worker: memory that stays, memory format, threads. Measured in docs/performance.md."""

from __future__ import annotations

import ctypes
import os

import torch
from torch import nn

from lockstep.arithmetic.layout import Layout
from lockstep.launch.machine import cores

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def set_up(layout: Layout, threads: int | None, allocator: str) -> None:
    """The threads and the allocator of this worker, before it computes anything."""
    if allocator != "system":
        keep_freed_memory()
    set_threads(layout, threads)


def describe(module: nn.Module, compiled: bool) -> str:
    """What was chosen that matters: memory format, compilation, CPU threads."""
    weights = [p for p in module.parameters() if p.ndim == 4 and min(p.shape[1:]) > 1]
    last = bool(weights) and all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    threads = torch.get_num_threads()
    return "channels_last, " * last + "compiled, " * compiled + f"{threads} thread{'s' * (threads > 1)}"


def keep_freed_memory() -> bool:
    """Tells glibc to keep what is freed: otherwise every large activation is returned to the kernel and comes back as
    fresh, unmapped pages (15 to 35% of a CPU step). True where the allocator took it (glibc only)."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def set_threads(layout: Layout, threads: int | None) -> int:
    """CPU threads of this worker: as asked, else its part of the cores; one under exact, where the number of threads
    would change the order of sums from layout to layout."""
    workers = max(1, layout.world_size // layout.num_nodes)
    chosen = threads or (1 if layout.exact else max(1, cores() // workers))
    torch.set_num_threads(chosen)
    os.environ["OMP_NUM_THREADS"] = str(chosen)  # else Lightning's ddp sets the number that it thinks best
    return chosen


def memory_format(module: nn.Module, choice: str) -> torch.memory_format:
    """`auto`: channels_last where there are 2-d convolutions (1.1 to 1.5 times as fast on CPU, and what tensor cores
    want), else contiguous. The module is converted in place."""
    convolutions = any(isinstance(layer, nn.Conv2d) for layer in module.modules())
    chosen = (
        torch.channels_last
        if choice == "channels_last" or (choice == "auto" and convolutions)
        else torch.contiguous_format
    )
    if chosen is torch.channels_last:
        module.to(memory_format=chosen)
    return chosen
