"""A worker set up for the fast path: memory that stays, no subnormal numbers, memory format, threads. Measured in
docs/results/fast.md."""

import ctypes
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from lockstep.config.check import Config
from lockstep.launch import logs
from lockstep.launch.environment import environment

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def set_up_worker(config: Config, folder: Path) -> int:
    """This worker's log, allocator and threads, before it computes anything; returns its rank."""
    rank = environment().rank
    logs.configure_logging(folder, rank)
    tempfile.tempdir = environment().scratch or None  # what others leave there goes with the run
    if config.speed.allocator != "system":
        keep_freed_memory()
    torch.set_flush_denormal(True)  # gradients of a loss near zero fall below 1e-38: up to 5 times as long a step
    threads = config.worker_threads
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # else Lightning's ddp sets the number that it thinks best
    return rank


def describe_choices(module: nn.Module, compiled: bool) -> str:
    """What was chosen that matters: memory format, compilation, CPU threads."""
    weights = [p for p in module.parameters() if p.ndim == 4 and min(p.shape[1:]) > 1]
    last = bool(weights) and all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    threads = torch.get_num_threads()
    return "channels_last, " * last + "compiled, " * compiled + f"{threads} thread{'s' * (threads > 1)}"


def keep_freed_memory() -> None:
    """Tells glibc to keep what is freed: otherwise every large activation is returned to the kernel and comes back as
    fresh, unmapped pages (15 to 35% of a CPU step)."""
    with suppress(OSError, AttributeError):  # another libc
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def apply_memory_format(module: nn.Module, choice: str) -> None:
    """`auto`: channels_last where there are 2-d convolutions (1.1 to 1.5 times as fast on CPU, and what tensor cores
    want), else contiguous. The module is converted in place."""
    convolutions = any(isinstance(layer, nn.Conv2d) for layer in module.modules())
    if choice == "channels_last" or (choice == "auto" and convolutions):
        module.to(memory_format=torch.channels_last)
