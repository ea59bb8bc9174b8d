"""Set up a worker for speed: allocator, subnormal numbers, memory format, threads.

docs/results/performance.md has the measurements.
"""

import ctypes
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from lockstep.config.check import Config
from lockstep.launch import logs, portable
from lockstep.launch.environment import environment

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from glibc's malloc.h


def set_up_worker(config: Config, folder: Path) -> None:
    """Set this worker's log, allocator and threads. Call it before the worker computes anything."""
    logs.configure_logging(folder, environment().rank)
    tempfile.tempdir = environment().scratch or None  # the run removes this folder at its end
    if config.speed.allocator != "system":
        keep_freed_memory()
    portable.set_up_worker(config.layout.exact)
    choose_tf32(config.speed.tf32)
    torch.set_flush_denormal(True)  # a loss near zero has gradients below 1e-38, which make a step up to 5 times slower
    threads = config.worker_threads
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # otherwise Lightning's ddp sets its own number


def choose_tf32(choice: bool | str) -> None:
    """Choose whether a GPU rounds the factors of float32 products to TF32: 10 bits after the point instead of 23.

    `auto` is torch's default, in convolutions only. It is set too, since a variable of the environment or an earlier
    run in this process may have set another one. torch refuses a mixture of these names and its newer ones
    (`fp32_precision`); Lightning and the compiler read these.
    """
    torch.backends.cudnn.allow_tf32 = choice is not False
    torch.backends.cuda.matmul.allow_tf32 = choice is True


def keep_freed_memory() -> None:
    """Make glibc keep freed memory.

    By default it returns each large activation to the kernel and gets unmapped pages for the next one, which takes 15
    to 35% of a step on a CPU.
    """
    with suppress(OSError, AttributeError):  # another libc has no mallopt
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def apply_memory_format(module: nn.Module, choice: str) -> None:
    """Convert a module's parameters to a memory format, in place.

    `auto` is channels_last for networks with 2-d convolutions (1.1 to 1.5 times as fast on a CPU, and the format of
    tensor cores), else contiguous.
    """
    convolutions = any(isinstance(layer, nn.Conv2d) for layer in module.modules())
    if choice == "channels_last" or (choice == "auto" and convolutions):
        module.to(memory_format=torch.channels_last)
