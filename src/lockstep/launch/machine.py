"""The cores, GPUs and compilers of this machine. The parent calls these functions; without a GPU they need no torch."""

import glob
import math
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path, PurePath

from lockstep.errors import UserError
from lockstep.launch.environment import environment
from lockstep.launch.forks import call_in_forks
from lockstep.text import plural

BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # Linux's names of CPU instructions: x86, x86, ARM
# device files: of NVIDIA's driver, Windows' Linux, AMD's ROCm, and Jetson
GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/nvhost-gpu", "/dev/nvgpu")
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # they hide some or all GPUs


def available_cores() -> int:
    """Return the number of CPU cores that this process may use, rounded up: 2 in a container limited to 1.5 cores."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([available, *cgroup_cpu_limits()])))


def cgroup_cpu_limits(cgroup_file: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> list[float]:
    """Return the CPU limits, in cores, that the control groups of this process set. See cgroups(7)."""
    quotas: list[float] = []
    with suppress(OSError):
        for line in Path(cgroup_file).read_text().splitlines():
            _, kinds, path = line.split(":", 2)  # `kinds` is empty in version 2
            for group in (PurePath(path), *PurePath(path).parents) if not kinds or "cpu" in kinds.split(",") else ():
                folder = Path(root, "cpu" * bool(kinds), str(group).lstrip("/"))  # a container sees its own group as /
                files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if kinds else ("cpu.max",)
                with suppress(OSError, ValueError):  # `max` means no limit
                    quota, period = map(int, " ".join((folder / file).read_text() for file in files).split())
                    quotas += [quota / period] if quota > 0 else []
    return quotas


def cores_per_worker(workers: int) -> int:
    """Return the number of cores for each worker of this machine. A SLURM task may have cores of its own."""
    return available_cores() if environment().dedicated_cores else max(1, available_cores() // workers)


def cpu_cap() -> int:
    """Return the largest number of CPU workers on one machine: 4 per core, but at least 8."""
    return max(8, 4 * available_cores())


def most_loader_processes(workers: int) -> int:
    """Return the largest number of loader processes of each worker: all together, as many as `cpu_cap`."""
    return max(1, cpu_cap() if environment().dedicated_cores else cpu_cap() // workers)


def gpu_count() -> int:
    """Return the number of CUDA devices that this process may use."""
    if not gpu_files():  # torch takes seconds to import
        return 0
    import torch

    return _call_in_child(torch.cuda.device_count)


def choose_devices(accelerator: str, devices: int | str) -> tuple[str, int]:
    """Return the accelerator, `cpu` or `gpu`, and the number of its devices on this machine.

    Args:
        accelerator: `cpu`, `gpu` or `auto`: GPUs if there are some.
        devices: the number of devices, or `auto`: all GPUs, or one CPU.

    Raises:
        UserError: this machine does not have them.
    """
    gpus = gpu_count() if accelerator != "cpu" else 0
    if accelerator == "gpu" and not gpus:
        raise UserError(
            f"accelerator=gpu: this machine has no GPU that torch can use: {no_gpu_reason()}; "
            "accelerator=cpu simulates devices"
        )
    number = (gpus or 1) if isinstance(devices, str) else devices
    # SLURM may show each worker only its own GPU, so one visible GPU does not mean one device.
    if gpus and number > gpus and not (environment().dedicated_gpu and gpus == 1):
        raise UserError(f"devices={number}: this machine has {plural(gpus, 'GPU')}; accelerator=cpu simulates more")
    if not gpus and number > cpu_cap():
        raise UserError(
            f"devices={number}: must be at most {cpu_cap()} on this machine's CPU (4 per core, but at least 8)"
        )
    return ("gpu" if gpus else "cpu"), number


def gpu_files() -> list[str]:
    """Return the device files of GPUs, which a driver makes."""
    return [file for pattern in GPU_FILES for file in glob.glob(pattern)]


def no_gpu_reason() -> str:
    """Return how GPUs were looked for, where `gpu_count` is 0."""
    if not (files := gpu_files()):
        return f"no driver has made one of {', '.join(GPU_FILES)} (NVIDIA, WSL, ROCm, Jetson)"
    hidden = {name: os.environ[name] for name in GPU_VARIABLES if name in os.environ}
    cause = "; ".join(f"{name}={value}" for name, value in hidden.items()) or "its build or the driver do not fit"
    return f"there is {files[0]}, but torch {version('torch')} finds no device ({cause})"


def hide_gpu(index: int) -> None:
    """Hide a GPU from the processes that this one starts later.

    Args:
        index: the GPU's position among those that are visible now.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpu_count())))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for i, gpu in enumerate(visible.split(",")) if i != index)


def computes_bf16(accelerator: str, cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Check whether the CPU (`cpu`) or all visible CUDA devices (`gpu`) have instructions for bf16.

    Without them bf16 is emulated: on a CPU `experiment=mnist_fast` takes 121 s instead of 17 s in float32.
    """
    if accelerator == "gpu":
        return _gpus_compute_bf16()
    return not BF16.isdisjoint(_cpu_flags(cpuinfo))


def has_amx(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Check whether the CPU has Intel's AMX instructions for bf16."""
    return "amx_bf16" in _cpu_flags(cpuinfo)


def _cpu_flags(cpuinfo: str) -> list[str]:
    """Return Linux's names of the CPU's instructions; systems other than Linux have no such file."""
    with suppress(OSError):
        flags = re.search(r"^(?:flags|Features)\s*:(.*)$", Path(cpuinfo).read_text(), re.MULTILINE)
        return flags[1].split() if flags else []
    return []


@cache
def _gpus_compute_bf16() -> bool:
    import torch

    def all_support_bf16() -> bool:
        return all(torch.cuda.get_device_capability(device) >= (8, 0) for device in range(torch.cuda.device_count()))

    return bool(_call_in_child(all_support_bf16))


def _call_in_child(function: Callable[[], int]) -> int:
    """Call a function in a fork of this process and return its result; 0 if it fails.

    The function may initialise CUDA, after which a process can't fork any more. NVML would count GPUs without CUDA, but
    not the parts of a GPU (MIG).
    """
    import torch

    if torch.cuda.is_initialized():
        return function()
    (answer,) = call_in_forks(function)
    return 0 if isinstance(answer, Exception) else answer


def compiler_lacking(accelerator: str) -> str | None:
    """Return what torch.compile needs and this machine lacks; None if nothing is missing.

    torch itself would fail only in the first step, with a long traceback.
    """
    if accelerator == "gpu":
        if find_spec("triton") is None:
            return "triton, which is not installed: pip install triton"
        kind, key, usual = "C", "CC", ["gcc", "clang"]  # triton looks for these
    else:
        kind, key, usual = "C++", "CXX", [{"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")]
    compilers = shlex.split(os.environ.get(key, ""))[:1] or usual
    if not any(map(shutil.which, compilers)):
        lacking = f"the PATH has no {' or '.join(compilers)}"
        return f"a {kind} compiler, and {lacking}: install it, or set {key} to another one"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return None if headers.is_file() else f"Python's headers, and there is no {headers}: install python3-dev, say"
